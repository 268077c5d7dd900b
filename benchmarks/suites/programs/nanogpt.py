"""nanoGPT's train.py under torchrun: `nanogpt.py CHECKOUT`; prints the losses of some steps of a tiny model.

The script takes a CUDA device wherever there are several ranks, so two of its lines and an argument are replaced.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np

ON_CPU = (
    ("    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", "    device = 'cpu'\n"),
    (", device_ids=[ddp_local_rank]", ""),
)
OPTIONS = {
    "device": "cpu", "compile": False, "dtype": "float32", "backend": "gloo", "dataset": "random", "max_iters": 10,
    "eval_iters": 1, "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 4,
    "gradient_accumulation_steps": 4, "always_save_checkpoint": False,
}  # fmt: skip

source = Path(sys.argv[1])
program = (source / "train.py").read_text()
for line, instead in ON_CPU:
    if line not in program:
        sys.exit(f"nanoGPT's train.py has changed: {line.strip()!r} is not in it")
    program = program.replace(line, instead)
with tempfile.TemporaryDirectory(prefix="suites-nanogpt-") as folder:
    os.chdir(folder)
    Path("configurator.py").write_text((source / "configurator.py").read_text())
    data = Path("data", "random")
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(1).integers(0, 64, 4096, dtype=np.uint16).tofile(data / name)
    sys.path.insert(0, str(source))
    sys.argv = ["train.py", *(f"--{name}={value}" for name, value in OPTIONS.items())]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, str(source / "train.py"), "exec"), {"__name__": "__main__"})  # noqa: S102
if os.environ["RANK"] == "0":
    print("RESULT", *re.findall(r"iter \d+: loss (\S+),", printed.getvalue()))
