"""memo's CUDA path on a device that is emulated: torch's CUDA build without a GPU."""
