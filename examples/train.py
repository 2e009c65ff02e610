"""Train a small network to find the same character in other typefaces, for characters it has never seen.

The 186 characters of data/glyphs.npz are split in halves: one to train on, one to evaluate on. Prints mean average
precision and recall@1 before and after, and saves a picture of the learning curve and of nearest neighbours.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from evaluation import Retrieval, embed, retrieval, save_picture
from glyphs import balanced_batches, distort, load_glyphs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from tritonloss import losses
from tritonloss.backends import resolve_backend, selected_backend
from tritonloss.distributed import DistributedLoss
from tritonloss.types import PNPVariant

EMBEDDING_SIZE = 128
LEARNING_RATE = 0.01
EVALUATE_EVERY = 40
STEPS = 200

# A loss may have parameters, as proxies are: the optimizer gets them too.
LOSSES: dict[str, Callable[[argparse.Namespace, int, int], nn.Module]] = {
    "pnp": lambda args, classes, size: losses.PNPLoss(anneal=args.temperature, variant=args.variant),
    "smoothap": lambda args, classes, size: losses.SmoothAPLoss(args.temperature),
    "soprc": lambda args, classes, size: losses.SOPRCLoss(classes),
    "proxy-anchor": lambda args, classes, size: losses.ProxyAnchorLoss(classes, size),
    "recall-at-k": lambda args, classes, size: losses.RecallAtKLoss(temperature=args.temperature),
    "sup-ap": lambda args, classes, size: losses.SupAPLoss(args.temperature),
    "triplet-margin": lambda args, classes, size: losses.TripletMarginLoss(),
    "histogram": lambda args, classes, size: losses.HistogramLoss(),
    "fastap": lambda args, classes, size: losses.FastAPLoss(),
    "ntxent": lambda args, classes, size: losses.NTXentLoss(),
    "supcon": lambda args, classes, size: losses.SupConLoss(),
    "multi-similarity": lambda args, classes, size: losses.MultiSimilarityLoss(),
    "circle": lambda args, classes, size: losses.CircleLoss(),
    "infonce": lambda args, classes, size: losses.InfoNCELoss(),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--loss", choices=LOSSES, default="pnp", help="what to train with")
    add(
        "--variant",
        choices=get_args(PNPVariant),
        default="Ds",
        help="variant of pnp. Mind Dq with a large batch: from a random start R, the negatives before a positive, is "
        "in the hundreds, and the gradient vanishes as (1 + R)^-(alpha + 1). At alpha = 1, as here, AdamW makes up for "
        "that; with a larger alpha or plain SGD learning slows or stalls: start with Ds",
    )
    add("--temperature", type=float, default=0.05, help="of the sigmoid that counts, in units of the cosine")
    add("--batch-size", type=int, default=256, help="images in a batch")
    add("--images-per-class", type=int, default=8, help="images of each class in a batch")
    add("--steps", type=int, default=STEPS, help="batches to train on")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ...")
    add("--seed", type=int, default=0, help="of the weights, the batches and the distortions")
    add("--output", type=Path, default=Path("build/train.png"), help="the picture to write")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}: expected at least 1")
    if args.images_per_class < 2:
        parser.error(
            f"--images-per-class is {args.images_per_class}: a query needs another image of its class"
        )
    if args.batch_size < 1 or args.batch_size % args.images_per_class:
        parser.error(f"--batch-size is {args.batch_size}: expected a multiple of {args.images_per_class}")
    if args.device == "cuda" and "LOCAL_RANK" in os.environ:
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    if (reason := why_not(args.device)) is not None:
        parser.error(f"--device is {args.device}, which cannot be used here: {reason}")
    return args


def why_not(device: str) -> str | None:
    """The first line of what torch says where it cannot compute on a device."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


def convolutional_network() -> nn.Sequential:
    """[N, 1, 28, 28] to [N, EMBEDDING_SIZE]: 28 -> 14 -> 7 -> 3 pixels a side.

    Each image is normalised by itself: what a process makes of its images does not depend on those of others.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((1, 32, 64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(1, outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 3 * 3, EMBEDDING_SIZE))


def peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB allocated on the GPU"
    try:
        import resource
    except ImportError:  # Windows
        return "not measured"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.0f} MiB resident (all of the process)"


def join_processes(args: argparse.Namespace) -> tuple[int, int]:
    """The rank of this process and their number: those of torchrun, which sets the environment, or 0 and 1."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    if args.device.startswith("cuda:"):
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    return dist.get_rank(), dist.get_world_size()


def main() -> None:
    args = arguments()
    rank, processes = join_processes(args)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    train, unseen = load_glyphs(device)
    classes, batch_classes = int(train.labels.max()) + 1, args.batch_size // args.images_per_class
    if batch_classes > classes:
        sys.exit(
            f"a batch of {batch_classes} classes x {args.images_per_class} images: there are {classes} classes"
        )
    batches = balanced_batches(train.labels, batch_classes, args.images_per_class, args.seed)

    network = convolutional_network().to(device, memory_format=torch.channels_last)
    model = network if processes == 1 else DistributedDataParallel(network)
    loss_function = LOSSES[args.loss](args, classes, EMBEDDING_SIZE).to(device)
    criterion = DistributedLoss(loss_function)
    optimizer = torch.optim.AdamW([*network.parameters(), *criterion.parameters()], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=args.steps)

    def evaluate() -> Retrieval:
        # One process evaluates; the others wait for it at the next batch.
        return retrieval(embed(network, unseen.images), unseen.labels) if rank == 0 else Retrieval(0, 0)

    scores, values, seconds = {0: evaluate()}, [], []
    if rank == 0:
        raw = retrieval(unseen.images, unseen.labels)
        print(f"raw pixels         {raw}\nuntrained network  {scores[0]}")
    bar = tqdm(range(1, args.steps + 1), desc=args.loss, unit="step", disable=rank > 0)
    for step in bar:
        start = time.perf_counter()
        rows = next(batches).to(device)
        # Every process distorts the whole batch, so that its part is the same whatever their number.
        images, labels = (
            part.tensor_split(processes)[rank] for part in (distort(train.images[rows]), train.labels[rows])
        )
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        values.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
        if step % EVALUATE_EVERY == 0 or step == args.steps:
            scores[step] = evaluate()
        bar.set_postfix(loss=f"{values[-1]:.3f}", mAP=f"{scores[max(scores)].mean_average_precision:.3f}")

    if processes > 1:
        dist.destroy_process_group()
    if rank > 0:
        return
    before, after = scores[0], scores[args.steps]
    print(f"trained network    {after}")
    (queries,) = islice(balanced_batches(unseen.labels, 10, 1, args.seed), 1)
    title = f"{args.loss}: characters never seen in training, {before} -> {after}"
    save_picture(
        args.output, title, values, scores, raw, *unseen, embed(network, unseen.images), queries.to(device)
    )
    print(
        f"gain: mAP {before.mean_average_precision:.3f} -> {after.mean_average_precision:.3f}, "
        f"recall@1 {before.recall_at_1:.3f} -> {after.recall_at_1:.3f}\n"
        f"time: {args.steps} steps in {sum(seconds):.1f} s, {statistics.median(seconds):.4f} s per step (median)\n"
        f"peak memory: {peak_memory(device)}\n"
        f"loss: {type(loss_function).__name__} on {device}, backend {resolve_backend(selected_backend(), device)}\n"
        f"picture: {args.output}"
    )
    if args.steps < STEPS:
        print(
            f"{args.steps} steps are few: retrieval may fall before it rises, and {STEPS} are meant (--steps {STEPS})"
        )


if __name__ == "__main__":
    main()
