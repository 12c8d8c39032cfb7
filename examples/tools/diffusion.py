"""Training of a diffusers UNet on noise: a model whose blocks differ, compiled whole.

python examples/tools/diffusion.py
"""

import torch
from beside_eager import compare
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional


def train(with_memo: bool) -> list[float]:
    """The losses of three updates."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    scheduler = DDPMScheduler(num_train_timesteps=100)
    if with_memo:
        unet.compile(backend="memo", options={"memory_budget": "4.4MiB"})
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        clean, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
        steps = torch.randint(0, 100, (2,))
        noisy = scheduler.add_noise(clean, noise, steps)
        loss = functional.mse_loss(unet(noisy, steps).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    compare(train, tolerance=1e-3)  # convolutions sum in another order
