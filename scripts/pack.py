"""Pack folders of ExoRL episodes into one memory-mapped store.

Example:
    python -m scripts.pack --domain cheetah --out ~/.cache/exoring/stores/cheetah \
        --sources ~/.cache/exoring/episodes/cheetah_run/supervised
"""

from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

import exorl
from scripts import command


@dataclass(frozen=True)
class Pack:
    """Pack folders of ExoRL episodes into one memory-mapped store.

    Attributes:
        sources: folders of episode_*.npz files; the name of a folder names its collector.
        domain: such as cheetah; the sizes of all arrays are checked against it.
        out: folder of the store; an identical store that is already there is kept.
        episodes: take only the first so many of each folder.
        skip_bad: leave out unreadable episodes and list them, instead of refusing.
    """

    sources: tuple[Path, ...]
    domain: str
    out: Path
    episodes: int | None = None
    skip_bad: bool = False


def main(args: Pack) -> None:
    """Pack, and say what is in the store."""
    store = exorl.pack(
        args.sources,
        args.out,
        domain=args.domain,
        episodes=args.episodes,
        skip_bad=args.skip_bad,
        progress=lambda files: tqdm(files, desc="pack", unit="episode", disable=None),
    )
    for skipped in store.index["skipped"]:
        print(f"skipped {skipped}")
    print(f"{len(store)} episodes, {store.offsets[-1]:,} rows in {store.path}")


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(Pack, description=__doc__)))
