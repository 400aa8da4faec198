"""Train a small U-Net to denoise photographs, over several devices.

    python examples/train_unet.py                  # every GPU there is, else two CPU workers
    python examples/train_unet.py --devices cpu,cpu,cpu --chunks 8 --checkpoint never
    python examples/train_unet.py --blocks 5 --channels 64 --size 192    # the published network
    python examples/train_unet.py --balance 30,35                        # without measuring layers

The photographs come with scikit-image. The network gets noisy color images and predicts
their clean luminance, so what it restores is gray. One photograph is held out; at the end
``unet.png`` shows it with noise, without noise, and as restored by the network. By default that
takes most of the noise, from 19 to 29 dB, and some of the fine texture.

The model is in ``examples/models/unet.py``. Its skip connections cross devices, but this program
does not have to know: the model is an ``nn.Sequential`` in a ``Pipe``, like any other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from models.unet import unet
from skimage import data, io
from torch import Tensor
from tqdm import trange
from train_gpt import devices, integers, positive, share_cores

from pipert import Pipe
from pipert.balance import balance_by_time

TRAINING = ("astronaut", "coffee", "rocket")  # photographs in skimage.data
HELD_OUT = "chelsea"  # another one
LUMINANCE = (0.2125, 0.7154, 0.0721)  # of red, green and blue in ITU-R BT.709
MIN_SIZE = 64  # the U-Net halves an image five times, and its norms need more than one pixel
MAX_SIZE = 400  # the height of the smallest photograph


@dataclass(frozen=True)
class Result:
    """Peak signal-to-noise ratio of the held-out luminance in dB, and the mean training losses."""

    noisy: float
    denoised: float
    losses: list[float]


# --- images: all are float, from 0 to 1 -----------------------------------------------------------


def photograph(name: str) -> Tensor:
    """Loads a photograph, ``[3, height, width]``."""
    pixels = torch.from_numpy(getattr(data, name)())
    return pixels.permute(2, 0, 1) / 255


def random_crops(photographs: list[Tensor], count: int, size: int) -> Tensor:
    """Cuts random squares out of random photographs: ``[count, 3, size, size]``."""
    crops = []
    for _ in range(count):
        image = photographs[int(torch.randint(len(photographs), ()))]
        top, left = (int(torch.randint(side - size + 1, ())) for side in image.shape[1:])
        crops.append(image[:, top : top + size, left : left + size])
    return torch.stack(crops)


def add_noise(images: Tensor, noise: float) -> Tensor:
    """Adds normal noise of standard deviation ``noise`` to every color of every pixel."""
    return images + noise * torch.randn_like(images)


def luminance(images: Tensor) -> Tensor:
    """Converts ``[batch, 3, height, width]`` to ``[batch, 1, height, width]``."""
    weights = images.new_tensor(LUMINANCE)
    return (images * weights[:, None, None]).sum(dim=1, keepdim=True)


def psnr(images: Tensor, targets: Tensor) -> float:
    """Returns the peak signal-to-noise ratio in dB: 10 dB more is a tenth of the squared error."""
    return -10 * F.mse_loss(images, targets).log10().item()


def save_side_by_side(path: Path, images: list[Tensor]) -> None:
    """Writes images of equal size, ``[1 or 3, height, width]``, to one PNG."""
    row = torch.cat([image.expand(3, -1, -1) for image in images], dim=2)
    io.imsave(path, (row.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())


# --- training -------------------------------------------------------------------------------------


def denoise(pipe: Pipe, noisy: Tensor) -> Tensor:
    """Predicts the clean luminance of noisy color images, on the last device.

    Instance norm hides brightness and contrast from the network, so the network predicts only
    what depends on neither: the residual to subtract, in units of the image's contrast.
    """
    gray = luminance(noisy).to(pipe.devices[-1])
    contrast = gray.std(dim=(1, 2, 3), keepdim=True)
    noise: Tensor = pipe(noisy.to(pipe.devices[0]))
    return gray - contrast * noise


def train(pipe: Pipe, options: argparse.Namespace) -> list[float]:
    """Trains on ``options.steps`` mini-batches of random crops; returns the loss of each."""
    photographs = [photograph(name) for name in TRAINING]
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps)
    losses = []
    pipe.train()
    with trange(options.steps, desc="training", unit="step") as bar:
        for _ in bar:
            clean = random_crops(photographs, options.batch, options.size)
            restored = denoise(pipe, add_noise(clean, options.noise))
            loss = F.mse_loss(restored, luminance(clean).to(pipe.devices[-1]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.4f}")
    return losses


# --- the command line -----------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Defines the options and their defaults."""
    parser = argparse.ArgumentParser(
        description="Train a small U-Net to denoise photographs, over several devices.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpus = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    modes = ("always", "except_last", "never")
    add = parser.add_argument
    add("--steps", type=positive, default=800, help="mini-batches to train on")
    add("--batch", type=positive, default=16, help="crops in a mini-batch")
    add("--size", type=positive, default=MIN_SIZE, help="side of a crop, in pixels")
    add("--noise", type=float, default=0.15, help="standard deviation of the noise; white is 1")
    add("--blocks", type=positive, default=1, help="B, convolutions per cell of the U-Net")
    add("--channels", type=positive, default=8, help="C, channels of the first cell; even")
    add("--lr", type=float, default=2e-2, help="peak learning rate")
    add("--seed", type=int, default=0, help="seed of the parameters, the crops and the noise")
    add("--devices", type=devices, default=gpus or "cpu,cpu", help="one device per partition")
    add("--balance", type=integers, help="layers per device; if omitted, found by measuring")
    add("--chunks", type=positive, default=4, help="micro-batches in a mini-batch")
    add("--checkpoint", choices=modes, default="except_last", help="micro-batches to recompute")
    add("--out", type=Path, default=Path("unet.png"), help="the picture to write")
    return parser


def build_pipe(options: argparse.Namespace) -> Pipe:
    """Spreads the U-Net over the devices; ``ValueError`` for invalid options."""
    if not MIN_SIZE <= options.size <= MAX_SIZE:
        raise ValueError(f"--size must be from {MIN_SIZE} to {MAX_SIZE}, not {options.size}")
    if not min(options.lr, options.noise) > 0:
        raise ValueError("--lr and --noise must be above 0")
    if not options.out.parent.is_dir():
        raise ValueError(f"--out needs a folder that exists, not {options.out.parent}")
    if options.out.suffix != ".png":
        raise ValueError(f"--out must end in .png, not {options.out.name}")
    model = unet(options.blocks, options.channels, dropout=0.0)  # the images have noise enough
    if options.balance is None:
        rows = -(-options.batch // options.chunks)  # in a micro-batch
        sample = torch.zeros(rows, 3, options.size, options.size)
        options.balance = balance_by_time(len(options.devices), model, sample)
    return Pipe(
        model,
        options.balance,
        devices=options.devices,
        chunks=options.chunks,
        checkpoint=options.checkpoint,
    )


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains with the options in ``argv``; a wrong option exits with a message and code 2."""
    parser = build_parser()
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    try:
        pipe = build_pipe(options)
    except (IndexError, ValueError) as error:
        parser.error(str(error))
    with pipe:
        share_cores(pipe.devices)
        where = ", ".join(f"{b} on {d}" for b, d in zip(pipe.balance, pipe.devices, strict=True))
        print(f"{len(pipe)} layers: {where}")
        losses = train(pipe, options)
        clean = photograph(HELD_OUT)[None]
        noisy = add_noise(clean, options.noise)
        pipe.eval()
        with torch.no_grad():
            restored = denoise(pipe, noisy).cpu()
    target = luminance(clean)
    result = Result(psnr(luminance(noisy), target), psnr(restored, target), losses)
    save_side_by_side(options.out, [noisy[0], target[0], restored[0]])
    print(f"held-out PSNR: {result.noisy:.2f} dB noisy, {result.denoised:.2f} dB denoised")
    print(f"wrote {options.out}: noisy, clean and restored; in gray, as luminance is predicted")
    return result


if __name__ == "__main__":
    main()
