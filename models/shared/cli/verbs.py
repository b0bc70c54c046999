"""The `megadit` command: finds the verb, loads its module, hands over the rest of the command line.

A verb's function takes the arguments after the verb and returns an exit code. Only the module of the verb that is
called is imported, so that `megadit --help` is immediate and needs none of the optional libraries.
"""

import sys
from importlib import import_module, metadata

from megadit.models.shared.cli.command import run_command
from megadit.models.shared.errors import UserError, choose_one, did_you_mean

VERBS: dict[str, tuple[str, str]] = {
    "new": ("megadit.train.new.command:main", "propose a training run for a folder of clips or images; --go starts it"),
    "prepare": ("megadit.train.data.prepare.command:main", "turn clips or the built-in digits into a training dataset"),
    "train": ("megadit.train.__main__:main", "train a recipe, on one rank or several"),
    "slurm": ("megadit.train.slurm.__main__:main", "write and submit the Slurm jobs from data to an exported model"),
    "bundle": ("megadit.train.checkpoints.to_bundle:main", "turn a checkpoint into a bundle: everything for inference"),
    "convert": (
        "megadit.models.commands.convert:main",
        "convert published weights to a bundle, or a bundle to their format",
    ),
    "push": ("megadit.models.commands.push_pull:push", "copy a bundle to a hub or a store"),
    "pull": ("megadit.models.commands.push_pull:pull", "copy a bundle from a hub or a store"),
    "generate": ("megadit.infer.generate.command:main", "generate videos from prompts"),
    "classify": ("megadit.infer.commands.classify:main", "classify images with a ViT or a CLIP model"),
    "similarity": (
        "megadit.infer.commands.similarity:main",
        "score image-text similarity with a CLIP model",
    ),
    "evaluate": ("megadit.infer.evaluate.command:main", "compute FVD and other metrics with intervals, and a report"),
    "evaluate tokenizer": ("megadit.infer.evaluate.tokenizer:main", "measure a tokenizer's reconstruction error"),
    "evaluate compare": (
        "megadit.infer.evaluate.report.report:main",
        "compare the metrics of several evaluations",
    ),
    "evaluate convert": (
        "megadit.infer.evaluate.convert:main",
        "convert public weights of Inception and I3D to extractors without executable code",
    ),
    "export": ("megadit.export.command:main", "turn a bundle into verified ONNX graphs and TensorRT engines"),
    "benchmark train": ("megadit.train.benchmarks.train:main", "time optimizer steps of a recipe on this machine"),
    "benchmark growth": ("megadit.train.benchmarks.growth:main", "plot the cost of a training step by size"),
    "benchmark scaling": ("megadit.train.benchmarks.scaling:main", "measure samples per second by number of ranks"),
    "benchmark cpu": ("megadit.export.benchmark_cpu:main", "time this CPU's runtimes beside diffusers' network"),
    "benchmark generate": ("megadit.infer.benchmarks.generate:main", "time a bundle under several runtimes"),
    "serve build-repository": (
        "megadit.serve.repository.build:main",
        "turn a bundle into a Triton model repository",
    ),
    "serve run": ("megadit.serve.launch.run:main", "run a Triton server on a model repository"),
    "serve up": ("megadit.serve.launch.up:main", "keep a Triton server and the video API in front of it running"),
    "serve gateway": ("megadit.serve.gateway.command:main", "serve the video API in front of Triton servers"),
    "serve keys": ("megadit.serve.gateway.command:keys", "add, list and revoke keys of the gateway"),
    "serve webhooks": (
        "megadit.serve.gateway.command:webhooks",
        "list failed webhook deliveries, or send them again",
    ),
    "serve ask": ("megadit.serve.ask:main", "ask a running service for videos"),
    "serve demo": ("megadit.serve.page.demo:main", "open a web page to try prompts; starts a service if none runs"),
    "distill": (
        "megadit.train.distill.command:main",
        "distill a bundle into a student of few function evaluations (NFE)",
    ),
    "reward": ("megadit.train.reward.command:main", "post-train a bundle by rewards (DiffusionNFT, Flow-GRPO)"),
    "tune-sampler": (
        "megadit.infer.commands.tune_sampler:main",
        "find the fewest function evaluations (NFE) that match a model's best quality",
    ),
    "calibrate-cache": (
        "megadit.infer.commands.calibrate_cache:main",
        "measure which denoiser calls `generate` can cache",
    ),
    "check-cache": (
        "megadit.infer.commands.calibrate_cache:check",
        "check a calibrated cache against its budget on other prompts",
    ),
    "info": ("megadit.infer.inspect.info:main", "describe a checkpoint, bundle or dataset"),
    "doctor": ("megadit.infer.inspect.doctor:main", "report what this machine can run and what is missing"),
    "completion": (
        "megadit.models.shared.cli.completion:main",
        "write a shell completion script",
    ),
    "demo": (
        "megadit.train.demos.digits.demo:main",
        "prepare, train, generate and score handwritten digits, in minutes on a CPU",
    ),
    "demo-conditioning": (
        "megadit.train.demos.digits.conditioning_demo:main",
        "fine-tune the demo's model on conditioning frames, clips, masks and instructions",
    ),
    "demo-distill": (
        "megadit.train.demos.digits.distill_demo:main",
        "distill the demo's model into students of four, two and one function evaluations",
    ),
    "demo-shapes": (
        "megadit.train.demos.shapes.demo:main",
        "train a model of shapes that move, turn and change colour, from captions and first frames",
    ),
    "demo-adapter": (
        "megadit.train.demos.digits.adapter_demo:main",
        "train a LoRA adapter for a new shape, from ten clips",
    ),
    "demo-reward": (
        "megadit.train.demos.digits.reward_demo:main",
        "post-train the demo's model by rewards for digits in the left half of the frame",
    ),
}
"""Verb, of one word or two -> (module:function, one line of help)."""
GROUPS: dict[str, tuple[str, ...]] = {
    "a first model": ("new", "prepare", "train", "bundle", "generate"),
    "demos": ("demo", "demo-shapes", "demo-conditioning", "demo-distill", "demo-adapter", "demo-reward"),
    "inspect and evaluate": (
        *("info", "evaluate", "evaluate tokenizer", "evaluate compare", "evaluate convert"),
        *("classify", "similarity"),
    ),
    "make it fast": (
        *("distill", "reward", "tune-sampler", "calibrate-cache", "check-cache", "export"),
        *("benchmark train", "benchmark growth", "benchmark scaling", "benchmark cpu", "benchmark generate"),
    ),
    "serve": (
        *("serve build-repository", "serve run", "serve up", "serve gateway", "serve keys", "serve webhooks"),
        *("serve ask", "serve demo"),
    ),
    "exchange models": ("convert", "push", "pull"),
    "machines": ("doctor", "slurm", "completion"),
}
"""Title in the help -> the verbs below it; every verb stands in one group."""


def main(argv: list[str] | None = None) -> int:
    """Runs `megadit VERB ...`; the exit code is 2 for an unknown verb."""
    argv = sys.argv[1:] if argv is None else argv
    return run_command(lambda _: _dispatch(argv), argv)  # all of argv: the verb reads --debug itself


def _dispatch(argv: list[str]) -> int:
    verb, *rest = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(_help())
        return 0
    if verb in ("-V", "--version", "version"):
        print(f"megadit {metadata.version('megadit')}")
        return 0
    if rest and f"{verb} {rest[0]}" in VERBS:
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    seconds = [known.removeprefix(f"{verb} ") for known in VERBS if known.startswith(f"{verb} ")]
    if seconds and verb not in VERBS and rest in (["-h"], ["--help"]):
        print(_help(f"{verb} "))
        return 0
    if seconds and verb not in VERBS:
        choose_one(rest[0] if rest else "", seconds, f"`megadit {' '.join([verb, *rest[:1]])}` is no command")
    if verb not in VERBS:
        raise UserError(f"unknown command {verb!r}{did_you_mean(verb, VERBS, 'see `megadit --help`')}")
    return load(verb)(rest) or 0


def load(verb: str):
    """The function behind a verb; raises UserError as `load_function`."""
    return load_function(VERBS[verb][0], verb)


def load_function(reference: str, verb: str):
    """The function that `module:function` names.

    Raises:
        UserError: if a library that `megadit VERB` needs is not installed.
    """
    module, _, function = reference.partition(":")
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("megadit"):
            raise
        raise UserError(
            f"`megadit {verb}` needs the library {error.name}, which is not installed; see `megadit doctor`"
        ) from error


def _help(prefix: str = "") -> str:
    """Help of the verbs that begin with `prefix`, by group."""
    lines = []
    for title, names in GROUPS.items():
        verbs = [verb for verb in names if verb.startswith(prefix)]
        lines += [f"{title}:", *(f"  {verb:{_WIDTH}}  {VERBS[verb][1]}" for verb in verbs), ""] if verbs else []
    return "\n".join(
        [
            "usage: megadit VERB ...",
            "",
            "Text-to-video diffusion transformers, from a folder of clips to videos.",
            "",
            *lines,
            "`megadit VERB --help` lists the options of one; --debug shows the traceback of an error.",
        ]
    )


_WIDTH = max(map(len, VERBS))


if __name__ == "__main__":
    raise SystemExit(main())
