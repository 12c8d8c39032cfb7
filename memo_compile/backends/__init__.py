"""What torch.compile calls: the entry point, its shapes, the capture of one graph."""
