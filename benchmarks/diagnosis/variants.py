"""What terminals, launchers, shippers and issue forms do to a log: each function takes lines and gives other lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

BAR = " 24%|##4       | 2400/10000 [41:10<2:10:01,  1.02s/it]"
CALM = [f"{{'loss': {2 / (n + 1):.3f}, 'learning_rate': 2e-05, 'epoch': {n / 100:.2f}}}" for n in range(12)]


def plain(lines: Sequence[str], chance: random.Random) -> list[str]:
    return [*CALM[:6], *lines]


def wrapped(lines: Sequence[str], chance: random.Random) -> list[str]:
    """A terminal of a fixed width, copied with its line ends; blanks at the end are kept or lost."""
    width = chance.choice((80, 100, 120, 132, 160, 211))
    blanks = chance.random() < 0.3
    found: list[str] = []
    for line in lines:
        parts = [line[at : at + width] for at in range(0, len(line), width)] or [""]
        found += [part.ljust(width) if blanks else part for part in parts]
    return [*CALM[:3], *found]


def wrapped_by_shipper(lines: Sequence[str], chance: random.Random) -> list[str]:
    """A shipper that cuts long lines and puts its prefix before every piece."""
    width = chance.choice((120, 160, 250))
    mark = chance.choice(
        ("2024-05-01T10:00:0{n}.123456789Z stderr F ", "3: ", "[default3]:", "(TrainWorker pid=4711) ", "> ")
    )
    found = []
    for n, line in enumerate(lines):
        for at in range(0, max(len(line), 1), width):
            found.append(mark.format(n=n % 10) + line[at : at + width])
    return found


def _each(prefix: Callable[[int, int], str]) -> Callable[[Sequence[str], random.Random], list[str]]:
    def apply(lines: Sequence[str], chance: random.Random) -> list[str]:
        return [prefix(number, chance.randrange(10_000)) + line for number, line in enumerate([*CALM[:3], *lines])]

    return apply


prefixed_srun = _each(lambda n, r: "0: ")
prefixed_kubectl = _each(lambda n, r: "[pod/train-worker-0/pytorch] ")
prefixed_docker = _each(lambda n, r: f"2024-05-01T10:{n % 60:02d}:00.{r:09d}Z ")
prefixed_ray = _each(lambda n, r: "\x1b[36m(TorchTrainer pid=4711, ip=10.0.0.3)\x1b[0m ")
prefixed_lost_escape = _each(lambda n, r: "[36m(TorchTrainer pid=4711)[0m ")
prefixed_cloudwatch = _each(lambda n, r: f"2024-05-01T10:00:{n % 60:02d}.{r % 1000:03d}Z\t")
prefixed_quote = _each(lambda n, r: "> ")
prefixed_compose = _each(lambda n, r: "trainer-0  | ")


def prefixed_role(lines: Sequence[str], chance: random.Random) -> list[str]:
    """torchrun --tee: the ranks' lines, and not the launcher's own."""
    return [f"[default{line[5]}]:{line}" if line.startswith("[rank") else line for line in [*CALM[:3], *lines]]


def behind_bars(lines: Sequence[str], chance: random.Random) -> list[str]:
    """A progress bar without a newline stands before a message as often as not."""
    return [(BAR if chance.random() < 0.5 else "") + line for line in lines]


def carriage_returns(lines: Sequence[str], chance: random.Random) -> list[str]:
    return [f"{BAR}\r{BAR}\r{line}" for line in lines]


def glued(lines: Sequence[str], chance: random.Random) -> list[str]:
    """Several records in one line, as a buffer without newlines leaves them."""
    found: list[str] = []
    for line in lines:
        if found and chance.random() < 0.5 and line.startswith("[rank") and found[-1].startswith("[rank"):
            found[-1] += line
        else:
            found.append(line)
    return found


def doubled(lines: Sequence[str], chance: random.Random) -> list[str]:
    """Blank lines in between, and Windows' line ends."""
    return [part for line in lines for part in (line + "\r", "\r")]


def foreign(lines: Sequence[str], chance: random.Random) -> list[str]:
    texts = ("请问这个问题怎么解决？", "学習が止まりました。", "학습이 멈췄습니다")
    return [part for line in lines for part in (chance.choice(texts), line)]


VARIANTS: dict[str, Callable[[Sequence[str], random.Random], list[str]]] = {
    "plain": plain, "wrapped": wrapped, "wrapped-by-shipper": wrapped_by_shipper, "srun": prefixed_srun, "kubectl": prefixed_kubectl, "docker": prefixed_docker,
    "ray": prefixed_ray, "lost-escape": prefixed_lost_escape, "cloudwatch": prefixed_cloudwatch, "quote": prefixed_quote, "compose": prefixed_compose,
    "role": prefixed_role, "bars": behind_bars, "carriage-returns": carriage_returns, "glued": glued, "doubled": doubled, "foreign": foreign,
}  # fmt: skip
