"""The verbs that make a quantised copy of a checkpoint, or a file for another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.options import Checkpoint, Json, Out, app, show


@app.command()
def quantize(
    model: Checkpoint,
    scheme: Annotated[str, typer.Option(help="w8a8, w4a8, w4a8-channel, w4a16, fp8 or paper-w4a8.")],
    out: Out,
    layout: Annotated[str, typer.Option("--format", help="compressed-tensors or ascend.")] = "compressed-tensors",
    without: Annotated[list[str], typer.Option(help="Leave out a step: quarot, awq, smooth or ssz.")] = [],  # noqa: B006
    text: Annotated[list[str], typer.Option(help="Calibration text: sources as in `glm5 data build`.")] = ["stdlib"],  # noqa: B006
    rows: Annotated[int, typer.Option(min=1, help="Rows of calibration text.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 512,
    measure: Annotated[int, typer.Option(min=0, help="Bytes of held-out text to measure bits per byte on.")] = 0,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Write a quantised copy of a checkpoint (resumes). `paper-w4a8` rotates and smooths before it rounds."""
    from glm5.launch.quantise import Options, run
    from glm5.obs.progress import QuietConsole

    options = Options(scheme, tuple(without), tuple(text), rows, length, seed, measure, layout)
    with QuietConsole().status("starting") as status:

        def progress(name: str, done: int, total: int) -> None:
            status.update(f"{name} ({done} of {total})")

        found = run(model, out, options, progress)
    if not as_json:
        found["steps"] = ", ".join(found["steps"]) or "none"
    show(found, as_json)


@app.command()
def export(
    model: Checkpoint,
    gguf: Annotated[str, typer.Option(help="The type of the file: F32, F16, BF16, Q8_0 or Q4_0.")],
    out: Annotated[Path, typer.Option(help="File to write, such as model.gguf.")],
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a GGUF file for llama.cpp."""
    from glm5.obs.progress import QuietConsole
    from glm5.quant.gguf_file import export_gguf

    with QuietConsole().status("starting") as status:
        found = export_gguf(
            model, out, gguf.upper(), lambda name, done, total: status.update(f"{name} ({done} of {total})")
        )
    show(found, as_json)
