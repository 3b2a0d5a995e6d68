"""Download one of ExoRL's 54 datasets, or part of it, ready for scripts.pack.

Example:
    python -m scripts.download --domain walker --algo proto --episodes 1000
    python -m scripts.pack --domain walker --out ~/.cache/exoring/stores/walker \
        --sources ~/.cache/exoring/datasets/walker/proto
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro

from exorl import datasets
from exorl.download import download
from exorl.http import Patience
from scripts import command


@dataclass(frozen=True)
class Download:
    """Download one of ExoRL's datasets, or part of it.

    Attributes:
        domain: cartpole, cheetah, jaco, point_mass_maze, quadruped or walker.
        algo: what collected it: aps, diayn, disagreement, icm, icm_apt, proto, random, rnd or smm.
        episodes: only the first so many, read out of the remote zip; default all.
        out: folder of the dataset, by default datasets/DOMAIN/ALGO under $EXORING_HOME.
        keep_zip: leave the zip beside the folder when its episodes are unpacked, as one that was
            there before always is.
        dry_run: say what would be downloaded, and, where that is known, whether it fits; and stop.
        base_url: where the zips lie, a mirror of the publisher's layout.
        timeout: seconds without a byte that count as a failure.
        retries: failures in a row, without a byte in between, that are forgiven.
    """

    domain: str
    algo: str
    episodes: int | None = None
    out: Path | None = None
    keep_zip: bool = False
    dry_run: bool = False
    base_url: str = datasets.BASE_URL
    timeout: float = 30.0
    retries: int = 6


def main(args: Download) -> None:
    """Download, and say where the episodes are."""
    dataset = datasets.dataset(args.domain, args.algo)
    folder = args.out or dataset.folder
    if args.dry_run:
        for line in _plan(dataset, folder, args):
            print(line)
        return
    buffer = download(
        dataset,
        folder,
        episodes=args.episodes,
        base=args.base_url,
        keep_zip=args.keep_zip,
        patience=Patience(retries=args.retries, timeout=args.timeout),
    )
    print(f"{len(list(buffer.glob('*.npz'))):,} episodes in {buffer}")


def _plan(dataset: datasets.Dataset, folder: Path, args: Download) -> list[str]:
    known = f"{dataset.size:,} bytes" if dataset.size else "length unknown until asked for"
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    return [
        f"from     {dataset.url(args.base_url)}",
        f"zip      {known}, SHA-256 {dataset.sha256 or 'unknown'}",
        f"take     {'all' if args.episodes is None else f'the first {args.episodes:,}'} episodes",
        f"to       {folder / 'buffer'}",
        f"free     {free / 1e9:.1f} GB; {_fits(dataset, free, args)}",
    ]


def _fits(dataset: datasets.Dataset, free: int, args: Download) -> str:
    if args.episodes is not None:
        return "what some episodes need is known only when they are asked for"
    if dataset.size is None:
        return "a whole dataset needs twice its zip until it is unpacked"
    # The episodes in it are compressed already: unpacked they are as large again.
    fits = "fits" if 2 * dataset.size <= free else "DOES NOT FIT"
    return f"zip and unpacked episodes need {2 * dataset.size / 1e9:.1f} GB: {fits}"


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(Download, description=__doc__)))
