"""What slimming a model's outputs saves: peak memory, time and bytes communicated,
beside what the first users' recipe claimed.

    python benchmarks/slim_outputs.py [--ranks 2] [--lengths 128,256,512,1024] [--json FILE]

A Qwen2.5-VL classifier of the installed transformers with random weights, shaped like the 7B model but small, runs text
of growing length. Three variants run in turn in every cycle, in rotating order, on the same weights:

    everything   hidden states and the key-value cache are returned
                 (config.output_hidden_states, and use_cache, the default)
    default      what transformers does when nobody asks: the cache alone
    slim         after slim_outputs()

Memory is the peak of the bytes in tensors above those before the step, from the profiler's allocation records (a pass
of its own, not timed). Bytes are what the kernel counted as received on this rank's TCP connections during a step.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ncclguard import faults
from ncclguard.bench.results import percentile, ratio
from ncclguard.torch_compat import sockets

VARIANTS = ("everything", "default", "slim")
LAYERS, HIDDEN, KV = 8, 128, 32  # of 7B: 28, 3584, 512
RECIPE = {"batch": 8, "length": 2048, "hidden": 3584, "kv": 512, "layers": 28, "ranks": 8}
SCENES = ("evaluate", "train", "train checkpointed", "predict", "engine evaluate", "engine train")


def classifier() -> Any:
    """The small classifier, equal on all ranks."""
    from ncclguard.integrations.qwen2_5_vl import Qwen2_5_VLForSequenceClassification
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": 1000,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "rope_theta": 10000.0,
        "pad_token_id": 0,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": HIDDEN}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=990, video_token_id=991, num_labels=3
    )
    model = Qwen2_5_VLForSequenceClassification(config)
    model.model.visual.requires_grad_(False)  # text only: DDP waits for every parameter that has a gradient
    return model


def become(model: Any, variant: str) -> None:
    """Make the model return what this variant returns."""
    from ncclguard.integrations.qwen2_5_vl import slim_outputs, unpatch

    (slim_outputs if variant == "slim" else unpatch)(model)
    inner = model.module if hasattr(model, "module") else model
    inner.config.text_config.output_hidden_states = variant == "everything"


def received() -> int:
    """Bytes that this process's TCP connections have received so far: tcpi_bytes_received of struct tcp_info."""
    total = 0
    for connection in sockets.connections(lambda local, remote: True):
        with socket.socket(fileno=os.dup(connection.fd)) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        total += struct.unpack_from("Q", info, 128)[0]
    return total


def peak(step: Callable[[], Any]) -> int:
    """The most bytes in CPU tensors during a step, above those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    records = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    highest = current = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        current += record.nbytes()
        highest = max(highest, current)
    return highest


def scenes(batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """What is measured at one length: the scene's name, the model to patch, and one step of it."""
    labels = torch.zeros(len(batch["input_ids"]), dtype=torch.long)
    wrapped: Any = torch.nn.parallel.DistributedDataParallel(classifier())

    def evaluate(model: Any = wrapped) -> None:
        """Two batches as in an evaluation loop: the first one's outputs are still there during the second forward."""
        model.module.eval()
        with torch.no_grad():
            for _ in range(2):
                outputs = model(**batch)
        del outputs

    def train(model: Any = wrapped) -> None:
        model.module.train()
        outputs = model(**batch, labels=labels)
        outputs.loss.backward()

    yield "evaluate", wrapped, evaluate
    yield "train", wrapped, train
    getattr(wrapped.module, "activation_checkpointing_enable", wrapped.module.gradient_checkpointing_enable)()
    yield "train checkpointed", wrapped, train
    if importlib.util.find_spec("accelerate"):
        trainer = trainer_of(classifier(), len(labels))
        row = {"input_ids": batch["input_ids"][0], "attention_mask": batch["attention_mask"][0], "labels": labels[0]}
        rows = [row] * (2 * len(labels) * dist.get_world_size())
        yield "predict", trainer.model, lambda: trainer.predict(rows)
    if importlib.util.find_spec("deepspeed"):
        engine = engine_of(classifier(), len(labels))
        yield "engine evaluate", engine, lambda: evaluate(engine)

        def engine_train() -> None:
            engine.module.train()
            engine.backward(engine(**batch, labels=labels).loss)
            engine.step()

        yield "engine train", engine, engine_train


def trainer_of(model: Any, batch: int) -> Any:
    """A transformers.Trainer that shows nothing."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        per_device_eval_batch_size=batch,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments)
    trainer.remove_callback(PrinterCallback)
    return trainer


def engine_of(model: Any, batch: int) -> Any:
    """A DeepSpeed engine, ZeRO-2."""
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2_000_000},  # its default takes 2 GB
        "zero_allow_untested_optimizer": True,
    }
    parameters = [each for each in model.parameters() if each.requires_grad]
    return deepspeed.initialize(model=model, optimizer=torch.optim.SGD(parameters, lr=1e-3), config=settings)[0]


def measure(lengths: list[int], size: int, cycles: int) -> None:
    """One rank: every length, scene and variant; the report has a list of rows."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = []
    for length in lengths:
        ids = torch.randint(1, 900, (size, length), generator=torch.Generator().manual_seed(dist.get_rank()))
        for scene, model, step in scenes({"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
            found.append({"scene": scene, "length": length, **one(model, step, cycles)})
            gc.collect()
    faults.report(rows=found, parameters=sum(each.numel() for each in classifier().parameters() if each.requires_grad))
    dist.destroy_process_group()


def one(model: Any, step: Callable[[], Any], cycles: int) -> dict[str, Any]:
    """Seconds of every cycle, bytes received and peak memory, by variant."""
    result: dict[str, Any] = {variant: {"seconds": [], "received": [], "peak": 0} for variant in VARIANTS}
    for cycle in range(cycles + 1):  # the first one warms up
        for place in range(len(VARIANTS)):
            variant = VARIANTS[(cycle + place) % len(VARIANTS)]
            become(model, variant)
            dist.barrier()
            before, started = received(), time.perf_counter()
            step()
            if cycle:
                result[variant]["seconds"].append(time.perf_counter() - started)
                result[variant]["received"].append(received() - before)
    for variant in VARIANTS:
        become(model, variant)
        result[variant]["peak"] = peak(step)
    return result


def head(arguments: argparse.Namespace) -> list[str]:
    """Where and with what."""
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("accelerate", "deepspeed"):
        if importlib.util.find_spec(name):
            versions[name] = importlib.metadata.version(name)
    memory = psutil.virtual_memory().total / 2**30
    return [
        "# python benchmarks/slim_outputs.py " + " ".join(sys.argv[1:]),
        (
            f"# {', '.join(f'{name} {version}' for name, version in versions.items())}, "
            f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
        ),
        (
            f"# {arguments.ranks} ranks over gloo on one host, 1 thread each; {os.cpu_count()} cores, {memory:.1f} GiB; "
            f"load {os.getloadavg()[0]:.1f} at the start"
        ),
        (
            f"# text model {LAYERS} layers x {HIDDEN}, keys and values {KV} each, float32; {arguments.batch} examples a rank, "
            f"{arguments.cycles} cycles; times and bytes of rank 0"
        ),
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each length, scene and variant."""
    lines = [
        (
            f"{'scene':<19}{'length':>7}  {'variant':<11}{'peak MB':>9}{'of everything':>15}"
            f"{'p50 ms':>10}  {'time of everything (quartiles)':<32}{'received MB':>12}"
        )
    ]
    for row in rows:
        full = row["everything"]
        for variant in VARIANTS:
            each = row[variant]
            against = ratio(each["seconds"], full["seconds"])
            spread = f"{against.median:.2f} ({against.low:.2f} to {against.high:.2f})"
            lines.append(
                f"{row['scene']:<19}{row['length']:>7,}  {variant:<11}{each['peak'] / 1e6:>9.2f}"
                f"{each['peak'] / full['peak']:>15.2f}{percentile(each['seconds'], 50) * 1e3:>10.1f}  {spread:<32}"
                f"{percentile(each['received'], 50) / 1e6:>12.3f}"
            )
    return lines


def size_of(batch: int, length: int, hidden: int, kv: int, layers: int, **_: int) -> tuple[int, int, int]:
    """Bytes in float32 of the last hidden state, of all hidden states, and of the key-value cache."""
    last = batch * length * hidden * 4
    return last, (layers + 1) * last, 2 * layers * batch * length * kv * 4


def saved(rows: list[dict[str, Any]], scene: str, what: str) -> str:
    """By how many per cent slim is below everything, from the shortest to the longest
    sequence; ~ where the quartiles include 0.
    """
    found = []
    for row in rows:
        if row["scene"] == scene:
            slim, full = row["slim"], row["everything"]
            if what == "peak":
                found.append(f"{100 * (1 - slim['peak'] / full['peak']):.0f}")
            else:
                against = ratio(slim["seconds"], full["seconds"])
                unsure = "~" if against.low <= 1 <= against.high else ""
                found.append(f"{unsure}{100 * (1 - against.median):.0f}")
    return (", ".join(found) + " %") if found else "not run"


def claims(rows: list[dict[str, Any]], batch: int, parameters: int) -> list[str]:
    """The recipe's figures, and beside each what was found here."""
    longest = max(row["length"] for row in rows)
    at = {row["scene"]: row for row in rows if row["length"] == longest}
    last, states, cache = size_of(batch, longest, HIDDEN, KV, LAYERS)
    recipe_last, recipe_states, recipe_cache = size_of(**RECIPE)
    less = at["evaluate"]["everything"]["peak"] - at["evaluate"]["slim"]["peak"]
    bytes_in = {
        scene: percentile(at[scene]["everything"]["received"], 50)
        for scene in ("evaluate", "engine evaluate", "predict", "train")
        if scene in at
    }
    product = RECIPE["ranks"] * RECIPE["batch"] * RECIPE["length"] * RECIPE["hidden"]
    return [
        "# the recipe's claims, and what was found (per cent: slim below everything, by growing length; ~: within the spread)",
        f"# claimed: 235 MB a GPU and forward. 8 x 2048 x 3584 in float32 is {recipe_last:,} bytes: right for one tensor, the last",
        "#   hidden state, which the head needs anyway. Kept for a caller are all of them, and the cache: at this shape",
        f"#   {recipe_states:,} and {recipe_cache:,} bytes a GPU and forward (computed; half in bfloat16).",
        f"#   Measured here in evaluation at {longest:,} tokens: {less:,} bytes less at the peak. One forward's hidden states are",
        f"#   {states:,} (of which the last, {last:,}, is there in any case) and its cache {cache:,}; in a loop the previous",
        "#   forward's are alive too.",
        (
            f"#   Peak memory: evaluation {saved(rows, 'evaluate', 'peak')}; training {saved(rows, 'train', 'peak')}; "
            f"with checkpointing {saved(rows, 'train checkpointed', 'peak')}."
        ),
        (
            "# claimed: evaluation 80 to 90 % faster. Measured: a loop of forwards "
            f"{saved(rows, 'evaluate', 'time')}; Trainer.predict {saved(rows, 'predict', 'time')}."
        ),
        (
            "# claimed: training 20 to 40 % faster. Measured: "
            f"{saved(rows, 'train', 'time')}; with checkpointing {saved(rows, 'train checkpointed', 'time')}; "
            f"DeepSpeed {saved(rows, 'engine train', 'time')}."
        ),
        "# claimed: DeepSpeed all-reduces hidden_states. Bytes that a rank received at the longest sequence, everything kept: "
        + "; ".join(f"{scene} {count:,.0f}" for scene, count in bytes_in.items())
        + ".",
        f"#   One forward's hidden states are {states:,} bytes, the gradients {4 * parameters:,}. Trainer.predict gathers all that a",
        "#   model returns; nothing else here sends any of it.",
        f"# claimed: 8 x 8 x 2048 x 3584 = 470,810,624, almost 467,019,003. The product is {product:,}; see docs/motivation.md.",
    ]


def main() -> None:
    """Run the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", default="128,256,512,1024", help="tokens, separated by commas")
    parser.add_argument("--batch", type=int, default=2, help="examples a rank and step")
    parser.add_argument("--cycles", type=int, default=6, help="steps of every variant")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    lines = head(arguments)
    print("\n".join(lines), flush=True)
    lengths = [int(each) for each in arguments.lengths.split(",")]
    job = faults.run_ranks(measure, arguments.ranks, args=[lengths, arguments.batch, arguments.cycles], timeout=1800)
    reports = job.check()[0].reports
    printed = [*table(reports["rows"]), *claims(reports["rows"], arguments.batch, reports["parameters"])]
    print("\n".join(printed))
    if arguments.json:
        found = {"schema_version": 1, "environment": lines, **reports}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
