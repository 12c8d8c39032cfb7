"""The named shapes as torch modules: one device's share of a model, for planning on fakes."""
