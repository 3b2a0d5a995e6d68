"""Pack ExoRL episodes, from folders or straight from zips, into one memory-mapped store.

Example:
    python -m scripts.pack --domain cheetah --out ~/.cache/exoring/stores/cheetah \
        --sources ~/.cache/exoring/episodes/cheetah_run/supervised
    python -m scripts.pack --domain walker --out ~/.cache/exoring/stores/walker --mix exorl8
"""

from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

import exorl
from exorl.packing import Select
from scripts import command


@dataclass(frozen=True)
class Pack:
    """Pack ExoRL episodes into one memory-mapped store.

    Attributes:
        domain: such as cheetah; the sizes of all arrays are checked against it.
        out: folder of the store; an identical store that is already there is kept.
        sources: folders or zips of episode_*.npz files; their names name the collectors.
        mix: instead of sources, exorl8: the first million steps of each of ExoRL's collectors but
            random, from where scripts.download puts them.
        episodes: take only so many of each source.
        select: which of them: the first (which explored least), the last, the first of each of so
            many equal stretches (stratified), or a random choice.
        seed: of the random choice.
        skip_bad: leave out unreadable episodes and list them, instead of refusing.
    """

    domain: str
    out: Path
    sources: tuple[Path, ...] = ()
    mix: str | None = None
    episodes: int | None = None
    select: Select = "first"
    seed: int = 0
    skip_bad: bool = False


def main(args: Pack) -> None:
    """Pack, and say what is in the store."""
    if bool(args.sources) == (args.mix is not None):
        raise ValueError("say what to pack by either --sources or --mix")
    store = exorl.pack(
        args.mix or args.sources,
        args.out,
        domain=args.domain,
        episodes=args.episodes,
        select=args.select,
        seed=args.seed,
        skip_bad=args.skip_bad,
        progress=lambda files: tqdm(files, desc="pack", unit="episode", disable=None),
    )
    for skipped in store.index["skipped"]:
        print(f"skipped {skipped}")
    print(f"{len(store)} episodes, {store.offsets[-1]:,} rows in {store.path}")


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(Pack, description=__doc__)))
