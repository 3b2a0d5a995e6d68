"""ExoRL's published datasets: nine collectors in six domains, one zip of episodes each."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from exorl.episodes import find
from exorl.paths import home
from exorl.tasks import domain_tasks

# github.com/denisyarats/exorl, README.md and download.sh.
BASE_URL = "https://dl.fbaipublicfiles.com/exorl"

DOMAINS = ("cartpole", "cheetah", "jaco", "point_mass_maze", "quadruped", "walker")

ALGORITHMS = (
    "aps",
    "diayn",
    "disagreement",
    "icm",
    "icm_apt",
    "proto",
    "random",
    "rnd",
    "smm",
)

# Bytes and SHA-256 where somebody wrote them down: the publisher gives none. The sums are those
# of github.com/ethanluoyc/corax, corax/datasets/tfds/exorl/checksums.tsv.
_KNOWN: dict[tuple[str, str], tuple[int | None, str | None]] = {
    ("cartpole", "proto"): (
        587_145_013,
        "0384fa7c899777150335b0d602c6b3d945cdc856adbd81341d1eb8848854a042",
    ),
    ("cheetah", "proto"): (
        2_280_144_517,
        "f18e42150977604b6244a5cdf97aa3e2d078700ab60440050b12b98f60dd00d8",
    ),
    ("jaco", "proto"): (
        2_502_210_180,
        "c8da7ff91856e1865deef46f964f4ed5d7663312769a941b71a9706a8a049476",
    ),
    ("point_mass_maze", "proto"): (
        527_876_713,
        "1839c8d7426fb43c33dcabfb1adf6d4128e43c94989a3d0f053244f4a7da5064",
    ),
    ("quadruped", "proto"): (
        7_768_551_121,
        "b9d613aaaadfd8bf75a9a9a52e3e61f27a473d5ab9b1bcd39c25056ab23234a5",
    ),
    ("walker", "proto"): (
        2_584_420_588,
        "a34d0edf628d4824d90d1bf6cb69b2d97bf0c753a09a04bffc3deab130277b42",
    ),
    ("walker", "rnd"): (2_585_461_986, None),
}


@dataclass(frozen=True)
class Dataset:
    """One published zip.

    Attributes:
        domain: Such as `walker`.
        algorithm: What collected it, such as `proto`.
        size: Bytes of the zip, None if unknown.
        sha256: Of the zip, None if unknown.
    """

    domain: str
    algorithm: str
    size: int | None = None
    sha256: str | None = None

    def url(self, base: str = BASE_URL) -> str:
        """Where the zip is published, or lies on a mirror with the same layout."""
        return f"{base.rstrip('/')}/{self.domain}/{self.algorithm}.zip"

    @property
    def folder(self) -> Path:
        """Where its episodes are unpacked, if nothing else is said; the zip is kept beside it."""
        return home() / "datasets" / self.domain / self.algorithm


DATASETS: dict[tuple[str, str], Dataset] = {
    (domain, algorithm): Dataset(domain, algorithm, *_KNOWN.get((domain, algorithm), (None, None)))
    for domain in DOMAINS
    for algorithm in ALGORITHMS
}
"""All 54 by (domain, algorithm)."""


def dataset(domain: str, algorithm: str) -> Dataset:
    """The dataset of a domain and an algorithm.

    Raises:
        ValueError: There is none; the message lists what there is and the closest of it.
    """
    for kind, name, known in (("domain", domain, DOMAINS), ("algorithm", algorithm, ALGORITHMS)):
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise ValueError(
                f"ExoRL has no {kind} {name!r}: did you mean {close!r}? Known: {', '.join(known)}"
            )
    return DATASETS[domain, algorithm]


@dataclass(frozen=True)
class Mix:
    """Datasets of one domain that are packed into one store.

    Attributes:
        name: Such as `exorl8`.
        algorithms: What collected them.
        steps: How many of each, the first.
    """

    name: str
    algorithms: tuple[str, ...]
    steps: int

    def episodes(self, domain: str) -> int:
        """How many of each dataset; `TaskError` if there is no such domain."""
        return -(-self.steps // domain_tasks(domain)[0].episode_length)

    def find(self, domain: str) -> dict[str, Path]:
        """Folder or zip of each algorithm's dataset, where `scripts.download` puts it.

        Raises:
            FileNotFoundError: Datasets are missing or hold too few episodes; the message says
                which, and how to fetch them.
            TaskError: There is no such domain.
        """
        episodes = self.episodes(domain)
        there: dict[str, Path] = {}
        for algorithm in self.algorithms:
            folder = dataset(domain, algorithm).folder
            for source in (folder, folder.with_name(f"{algorithm}.zip")):
                if source.exists() and len(find(source)) >= episodes:
                    there.setdefault(algorithm, source)
        missing = [algorithm for algorithm in self.algorithms if algorithm not in there]
        if missing:
            commands = "".join(
                f"\n  python -m scripts.download --domain {domain} --algo {algorithm} "
                f"--episodes {episodes}"
                for algorithm in missing
            )
            raise FileNotFoundError(
                f"{dataset(domain, missing[0]).folder.parent}: {len(missing)} of the "
                f"{len(self.algorithms)} datasets of {self.name} are missing "
                f"or have fewer than {episodes:,} episodes; fetch them by{commands}"
            )
        return there


_MIXES = (Mix("exorl8", tuple(name for name in ALGORITHMS if name != "random"), 1_000_000),)

MIXES: dict[str, Mix] = {mix.name: mix for mix in _MIXES}
"""`exorl8` is what Agentic Transformers trained on, as far as known: eight of the collectors."""
