"""The torch.compile entry point and the two lowerings."""
