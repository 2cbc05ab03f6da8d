"""Verbs about one model: show its size, initialise, generate text, chat, serve, evaluate."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5.cli.options import (
    ChatTemplate,
    Checkpoint,
    Device,
    Dtype,
    Json,
    Port,
    app,
    assignments,
    model_config,
    show,
    told,
)  # fmt: skip
from glm5.errors import UsageError


@app.command()
def size(
    model: Annotated[str, typer.Argument(help="A preset or a checkpoint directory.")],
    context: Annotated[int, typer.Option(min=0, help="Tokens of context for FLOPs and memory.")] = 4096,
    as_json: Json = False,
) -> None:
    """Count parameters, cache bytes and FLOPs."""
    from glm5.config.arithmetic import size_report

    report = size_report(model_config(model), context)
    if not as_json:
        for group in ("components", "layers"):
            report |= {f"{group}.{name}": count for name, count in report.pop(group).items()}
    show(report, as_json)


@app.command()
def init(
    preset: str,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    overrides: Annotated[list[str], typer.Option("--set", help="Override a config key: --set hidden_size=64.")] = [],  # noqa: B006
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer directory; default: bytes only.")] = None,
    seed: int = 0,
) -> None:
    """Write a randomly initialised checkpoint."""
    from glm5.chat import Tokenizer
    from glm5.config.arithmetic import size_report
    from glm5.config.model import GLM5Config
    from glm5.files import publish_dir
    from glm5.model.glm5 import GLM5ForCausalLM
    from glm5.model.hf_weights import write_checkpoint

    used = Tokenizer.load(tokenizer) if tokenizer else Tokenizer.byte_level()
    values = {
        "vocab_size": used.vocab_size,
        "eos_token_id": used.stop_token_ids,
        "pad_token_id": used.pad_token_id,
        **assignments(overrides),
    }
    config = GLM5Config.preset(preset, **values)
    needed, there = 4 * size_report(config, 0)["total_params_with_mtp"], _memory()
    if there is not None and needed > there:
        raise UsageError(
            f"{preset} takes {needed / 1e9:,.0f} GB in fp32, this machine has {there / 1e9:,.0f} GB; choose a smaller "
            "preset or make it smaller with --set."
        )
    model = GLM5ForCausalLM(config, seed=seed)
    with publish_dir(out, unlike="shards.json") as folder:
        write_checkpoint(model, folder)
        used.save(folder)
    typer.echo(f"Wrote {preset} with {sum(p.numel() for p in model.parameters()):,} parameters to {out}.")


@app.command()
def generate(
    model: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="Text, or comma-separated ids with --ids.")],
    ids: Annotated[bool, typer.Option("--ids", help="Take and print token ids.")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer directory, if not the model's.")] = None,
    max_tokens: int = 128,
    temperature: float = 1.0,
    seed: int = 0,
    exact: Annotated[
        bool, typer.Option("--exact/--fast", help="Bitwise equal to the learner, or fast; --json compares.")
    ] = True,
    device: Device = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and cache.")] = Dtype.float32,
    as_json: Json = False,
) -> None:
    """Continue a prompt (plain text, no chat template)."""
    from glm5.chat import Tokenizer
    from glm5.engine.difference import measure
    from glm5.engine.engine import Engine
    from glm5.records import SamplingParams

    engine = Engine.from_pretrained(model, dtype=dtype.value, device=device, exact=exact)
    if tokenizer is not None:
        engine.tokenizer = Tokenizer.load(tokenizer)
    if ids:
        try:
            prompt_ids = [int(part) for part in prompt.split(",")]
        except ValueError:
            raise UsageError(f"--ids must be comma-separated integers, not {prompt!r:.60}.") from None
    elif engine.tokenizer is None:
        raise UsageError(f"{model} has no tokenizer; give one with --tokenizer, or use --ids.")
    else:
        prompt_ids = engine.tokenizer.encode(prompt)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    (done,) = engine.generate([prompt_ids], params)
    text = "" if engine.tokenizer is None else engine.tokenizer.decode(done.token_ids)
    result = {"text": text, "ids": done.token_ids, "logprobs": done.logprobs, "finish_reason": done.finish_reason}
    if as_json:
        difference = measure(engine, [prompt_ids], [done], temperature)
        show({**result, "difference_to_learner": vars(difference)}, True)
    else:
        typer.echo(",".join(map(str, done.token_ids)) if ids else text)


@app.command()
def chat(
    model: Checkpoint,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    no_thinking: Annotated[bool, typer.Option("--no-thinking", help="Answer without thinking.")] = False,
    tools: Annotated[Path | None, typer.Option(help="JSON file of tools; you type their results.")] = None,
    chat_template: ChatTemplate = None,
    device: Device = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and cache.")] = Dtype.float32,
) -> None:
    """Talk to a model in the terminal; /help there lists the commands."""
    from glm5.terminal.chat import run

    run(model, max_tokens, temperature, seed, system, not no_thinking, tools, chat_template, device, dtype.value)


@app.command()
def serve(
    model: Checkpoint,
    host: str = "127.0.0.1",
    port: Port = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Required unless --host is loopback. `ps` shows it; prefer GLM5_API_KEY.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; only its owner may read it.")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the key for weights, pauses and aborts; or GLM5_ADMIN_KEY.")
    ] = None,
    allowed_origin: Annotated[list[str], typer.Option(help="Site whose pages may use this server; repeatable.")] = [],  # noqa: B006
    trusted_proxy: Annotated[
        list[str], typer.Option(help="Address whose X-Forwarded headers are trusted; repeatable.")
    ] = [],  # noqa: B006
    dp: Annotated[int, typer.Option(min=1, help="Engine processes; a router keeps each session on one.")] = 1,
    max_engines: Annotated[
        int | None, typer.Option(min=1, help="Most engine processes; POST /workers may add some to --dp.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Processes (devices) per engine; each has a part of every layer.")] = 1,
    flash_comm: Annotated[
        str | None, typer.Option(help="With --tp: plain or int8, divides prompts' tokens between layers.")
    ] = None,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Divide the experts among the --dp engines, which step together.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(help='Engines on all nodes of a Ray cluster: HOST:PORT of its head, or "auto", or "local".'),
    ] = None,
    ray_shared: Annotated[
        bool, typer.Option("--ray-shared", help="With --ray: all nodes see the checkpoint; else it is sent to them.")
    ] = False,
    engine_gpus: Annotated[
        float | None, typer.Option(min=0, help="With --ray: GPUs per engine; default: --tp, if the cluster has any.")
    ] = None,
    engine_threads: Annotated[
        int | None, typer.Option(min=1, help="With --ray: CPUs per process; default: OMP_NUM_THREADS, or 1.")
    ] = None,
    prefill_engines: Annotated[
        int, typer.Option(min=0, help="Engine processes that only read prompts, for --decode-engines.")
    ] = 0,
    decode_engines: Annotated[
        int, typer.Option(min=0, help="Engine processes that generate; prompts come from --prefill-engines.")
    ] = 0,
    prefill_url: Annotated[
        list[str], typer.Option(help="Server of the same model that reads prompts for this one; repeatable.")
    ] = [],  # noqa: B006
    prefill_key_file: Annotated[
        Path | None, typer.Option(help="File with its admin key, or its API key; or GLM5_PREFILL_KEY.")
    ] = None,
    prefill_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens not in the cache from which a prompt goes to a prefill engine.")
    ] = 256,
    exact: Annotated[bool, typer.Option("--exact/--fast", help="Engine: bitwise reproducible, or fast.")] = False,
    speculative: Annotated[int, typer.Option(min=0, help="Engine: tokens the MTP layer drafts per step.")] = 0,
    max_batch: Annotated[int, typer.Option(min=1, help="Engine: maximum samples per step.")] = 64,
    cache_tokens: Annotated[int | None, typer.Option(min=1, help="Engine: tokens in the cache.")] = None,
    host_cache_mb: Annotated[int, typer.Option(min=0, help="Engine: host memory for prefixes, in MiB.")] = 0,
    disk_cache: Annotated[Path | None, typer.Option(help="Engine: folder for prefixes on disk.")] = None,
    disk_cache_mb: Annotated[int, typer.Option(min=1, help="Engine: the most MiB of --disk-cache.")] = 1024,
    device: Device = "auto",
    graphs: Annotated[bool, typer.Option(help="Engine: CUDA graphs of decoding, on CUDA devices.")] = True,
    dtype: Annotated[Dtype, typer.Option(help="Engine: type of weights and cache.")] = Dtype.float32,
    quantize: Annotated[str | None, typer.Option(help="Engine: int8, int4 or fp8, rounds weights.")] = None,
    cache_dtype: Annotated[str | None, typer.Option(help="Engine: int8: a smaller cache (--fast, CPU, DSA).")] = None,
    chat_template: ChatTemplate = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Limit: requests at once (429 beyond).")] = 512,
    max_samples: Annotated[int, typer.Option(min=1, help="Limit: samples of an engine at once (429).")] = 256,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Limit: body of a request, in MiB (413).")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Limit: prompt plus answer (400).")] = None,
    request_seconds: Annotated[
        float, typer.Option(min=0.1, max=604_800, help="Limit: time for an answer (504).")
    ] = 1800,
    stop_seconds: Annotated[float, typer.Option(min=0, max=86_400, help="Limit: time to finish when it stops.")] = 10,
) -> None:
    """Serve OpenAI, Anthropic and SGLang requests, and a chat page."""
    from glm5.serve.access import Access
    from glm5.serve.keys import find_key
    from glm5.serve.options import EngineOptions, Limits, PrefillServers

    key = find_key("api", api_key, api_key_file)
    servers = PrefillServers(tuple(prefill_url), find_key("prefill", None, prefill_key_file) or "")
    access = Access(find_key("admin", None, admin_key_file), tuple(allowed_origin), tuple(trusted_proxy))
    options = EngineOptions(
        exact,
        speculative,
        cache_tokens,
        host_cache_mb << 20,
        max_batch,
        dtype.value,
        chat_template,
        device,
        tp,
        graphs,
        quantize,
        cache_dtype,
        None if disk_cache is None else str(disk_cache),
        disk_cache_mb << 20,
        dp if expert_parallel else 1,
        flash_comm=flash_comm,
    )
    limits = Limits(
        connections=max(Limits.connections, 2 * max_requests),
        body_bytes=max_body_mb << 20,
        requests=max_requests,
        samples=max_samples,
        tokens=max_tokens,
        request_seconds=request_seconds,
        stop_seconds=stop_seconds,
        prefill_tokens=prefill_tokens,
    )
    if bool(prefill_engines) != bool(decode_engines) or (prefill_engines and dp > 1):
        raise UsageError("Give both --prefill-engines and --decode-engines, and no --dp; or neither.")
    if expert_parallel and dp == 1:
        raise UsageError("--expert-parallel divides the experts among several engines; give --dp too.")
    if ray is None and (ray_shared or engine_gpus is not None or engine_threads is not None):
        raise UsageError("--ray-shared, --engine-gpus and --engine-threads go with --ray only.")
    engines = prefill_engines + decode_engines or dp
    if engines == 1 and (max_engines or 1) == 1 and ray is None:
        from glm5.serve.app import run

        run(model, host, port, key, access=access, limits=limits, options=options, prefill_servers=servers)
    else:
        from glm5.serve.router.app import run as route

        given: dict[str, Any] = {}
        if ray is not None:
            from glm5.rollout.ray_pool import RayPool, settings

            given["pool"] = partial(RayPool, launch=settings(ray, engine_gpus, engine_threads, ray_shared))
        route(
            model,
            host,
            port,
            key,
            access=access,
            engines=engines,
            prefill=prefill_engines,
            most=max_engines,
            limits=limits,
            options=options,
            prefill_servers=servers,
            **given,
        )


@app.command()
def gateway(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint; with --engines only its tokenizer. Or `check` or `export`.")
    ] = None,
    url: Annotated[
        str | None, typer.Argument(help="The URL to check; the store to export (default: that of --store).")
    ] = None,
    engines: Annotated[list[str], typer.Option(help="URL of an SGLang or vLLM server; repeatable.")] = [],  # noqa: B006
    store: Annotated[Path, typer.Option(help="File of the sessions; made if missing.")] = Path("sessions.db"),
    host: str = "127.0.0.1",
    port: Port = 8100,
    socket: Annotated[Path | None, typer.Option(help="Unix socket to listen on as well, for agents in rooms.")] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the admin key; or GLM5_ADMIN_KEY. Default: made beside the store.")
    ] = None,
    engine_key_file: Annotated[Path | None, typer.Option(help="File with the engines' API key.")] = None,
    exact: Annotated[bool, typer.Option("--exact/--fast", help="Engine: bitwise reproducible, or fast.")] = False,
    max_batch: Annotated[int, typer.Option(min=1, help="Engine: maximum samples per step.")] = 64,
    device: Device = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Engine: type of weights and cache.")] = Dtype.float32,
    chat_template: ChatTemplate = None,
    request_seconds: Annotated[float, typer.Option(min=0.1, max=604_800, help="Limit: time for an answer.")] = 1800,
    as_json: Json = False,
) -> None:
    """Sessions for agents that others wrote: their requests in, token ids to train on out.

    `check URL` tests a running gateway, `export [FILE]` prints a store (default: that of --store) as JSON lines."""
    from glm5.serve.keys import find_key
    from glm5.serve.options import EngineOptions

    if url is not None and str(model) not in ("check", "export"):
        raise UsageError(
            f"gateway takes one checkpoint, or `check` and a URL, or `export` and a store, not {str(model)!r:.60} and "
            f"{url!r:.60}."
        )
    if str(model) == "export":
        from glm5.rollout.export import export

        path, found = Path(url) if url is not None else store, False
        for line in export(path):
            typer.echo(line)
            found = True
        if not found:
            told(f"{path} has no sessions.")
        return
    if str(model) == "check":
        _check_gateway(url, find_key("admin", None, admin_key_file), as_json)
        return
    from glm5.rollout.process import LIMITS, run

    run(
        model,
        engines,
        store,
        host,
        port,
        socket_path=socket,
        admin_key_file=admin_key_file,
        engine_key=None if engine_key_file is None else find_key("api", None, engine_key_file),
        limits=replace(LIMITS, request_seconds=request_seconds),
        options=EngineOptions(
            exact, max_batch=max_batch, dtype=dtype.value, chat_template=chat_template, device=device
        ),
        as_json=as_json,
    )


def _check_gateway(url: str | None, key: str | None, as_json: bool) -> None:
    from glm5.rollout.check import run

    if url is None or key is None:
        raise UsageError("gateway check needs a URL, and the admin key from --admin-key-file or GLM5_ADMIN_KEY.")
    found = {}
    for promise, broken in run(url, key):
        found[promise] = broken
        if not as_json:
            typer.echo(f"{'ok' if broken is None else 'BROKEN'}  {promise}{'' if broken is None else f' ({broken})'}")
    if as_json:
        show({"ok": not any(found.values()), "checks": found}, True)
    if any(found.values()):
        raise typer.Exit(1)


def _memory() -> int | None:
    """Bytes of this machine's memory; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
