"""memo: a torch.compile backend that plans activation memory."""
