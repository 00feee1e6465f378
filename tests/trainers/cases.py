"""What is run with each trainer: the layouts, and for each the jobs whose numbers have to be equal. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = Path("runs/trainers")  # relative, as commands are run in the repository's root
MODEL = RUNS / "model"
DATA = RUNS / "data"
CONFIGS = Path("configs/trainers")
ENVIRONMENTS = Path(".trainers")
RANKS = 2
METHODS = ("full", "lora", "dpo")
STEPS, SAVED_STEP = 4, 2  # a checkpoint in the middle, to go on from
GLOBAL_BATCH, ACCUMULATE = 4, 2
SAMPLES = STEPS * GLOBAL_BATCH


@dataclass(frozen=True)
class Layout:
    """One DeepSpeed config of configs/trainers, on two ranks.

    Attributes:
        name: the file's, without suffix.
        plain: that of the config without the block, for the reference.
    """

    name: str
    stage: int
    tp: int = 1
    etp: int = 1
    ep: int = 1

    @property
    def plain(self) -> str:
        return f"zero{self.stage}"

    @property
    def label(self) -> str:
        sizes = (("tp", self.tp), ("etp", self.etp), ("ep", self.ep))
        return f"ZeRO-{self.stage}, " + " x ".join(f"{name} {size}" for name, size in sizes if size > 1)


LAYOUTS = (
    Layout("zero1_etp2", 1, etp=2),
    Layout("zero3_ep2", 3, ep=2),
    Layout("zero1_tp2_etp2", 1, tp=2, etp=2),
)
# Saved in the one, gone on with in the other: from cut experts at ZeRO-1 to whole ones at ZeRO-3.
SAVED_IN, RESUMED_IN = LAYOUTS[0], LAYOUTS[1]


@dataclass(frozen=True)
class Job:
    """One training run, from which a trainer makes its command.

    Attributes:
        method: of METHODS.
        config: path of the DeepSpeed config.
        rows: sequences (of DPO: pairs) a rank and micro batch. Tensor-parallel ranks share a batch, of twice the rows:
            the samples of a step are the same.
        resume: the checkpoint to go on from.
        router_loss: whether a trainer that adds the router's loss by itself does so.
    """

    method: str
    config: Path
    output: Path
    rows: int = 1
    resume: Path | None = None
    router_loss: bool = True


@dataclass(frozen=True)
class Script:
    """A file that a trainer's commands run and that no package has: it is downloaded into the environment.

    Attributes:
        url: of one commit, which never changes.
        sha256: of the file.
    """

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Trainer:
    """One trainer's commands, and how what they leave behind is found.

    Attributes:
        name: of its environment, requirements file, results and output folders.
        packages: distributions whose releases the page shows, the trainer's first.
        train: the command of a job, without `DS_ETP=1`.
        merge: the trainer's own command that merges an adapter into the model: adapter folder, output folder.
        methods: those that it has.
        final: the folder, inside a job's output, that the trained model is saved in.
        router_loss: methods whose loss has the router's, a mean over the tokens of a micro batch, in it. With `tp` 2
            micro batches are larger, and another mean is right: those runs, and their references, do without.
        left_out: for a cell (`"dpo zero3_ep2"`, `"resume"`, ...) that can't be run the reason.
        notes: lines for the page.
        script: what the commands need beside packages.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    train: Callable[[Job], str]
    merge: Callable[[Path, Path], str] | None = None
    methods: tuple[str, ...] = METHODS
    final: str = "."
    router_loss: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    script: Script | None = None


@dataclass(frozen=True)
class Case:
    """A command and what is asked of it.

    Attributes:
        id: `method layout`, `plain method zero1`, `resume`, `export full`, `unread`.
        column: of the page's table; "" for references.
        command: as a shell takes it, run in the repository's root.
        output: the folder it leaves things in, emptied before.
        reference: the id of the case with the numbers that have to come out.
        compare: "losses", with the weights ("both") or the weights alone ("weights").
        first_step: of the losses that are compared.
        layout: the experts have to be split so; None: they must not be split.
        warns: whether ds_etp has to say that nobody reads the block.
    """

    id: str
    column: str
    command: str
    output: Path
    method: str = ""
    final: str = "."
    reference: str = ""
    compare: str = "both"
    first_step: int = 1
    layout: Layout | None = None
    warns: bool = False


def cases(trainer: Trainer) -> Iterator[Case]:
    """All cases of a trainer, references and what others need first."""
    folder = RUNS / trainer.name

    def case(id: str, job: Job, column: str, on: bool = True, **more: object) -> Case:
        command = ("DS_ETP=1 " if on else "") + trainer.train(job)
        return Case(id, column, command, job.output, job.method, trainer.final, **more)  # type: ignore[arg-type]

    for method in trainer.methods:
        layouts = [layout for layout in LAYOUTS if f"{method} {layout.name}" not in trainer.left_out]
        for name in dict.fromkeys(layout.plain for layout in layouts):
            job = Job(method, CONFIGS / f"{name}.json", folder / f"{method}-{name}")
            yield case(f"plain {method} {name}", job, "", on=False)
        for layout in layouts:
            job = Job(method, CONFIGS / f"{layout.name}.json", folder / f"{method}-{layout.name}", layout.tp)
            reference = f"plain {method} {layout.plain}"
            if layout.tp > 1 and method in trainer.router_loss:
                job = replace(job, router_loss=False)
                output = folder / f"{method}-{layout.plain}-no-router-loss"
                plain = Job(method, CONFIGS / f"{layout.plain}.json", output, router_loss=False)
                reference += " without router loss"
                yield case(reference, plain, "", on=False)
            yield case(f"{method} {layout.name}", job, method, reference=reference, layout=layout)
    yield from _around_full_training(trainer, folder, case)
    if trainer.merge is not None and "lora" in trainer.methods:
        yield from _merged(trainer, folder)


def _around_full_training(trainer: Trainer, folder: Path, case: Callable[..., Case]) -> Iterator[Case]:
    """Going on in another layout, taking the model out of a checkpoint, and a block that nobody reads."""
    saved = folder / f"full-{SAVED_IN.name}" / f"checkpoint-{SAVED_STEP}"
    reference = f"plain full {SAVED_IN.plain}"
    if "resume" not in trainer.left_out:
        job = Job("full", CONFIGS / f"{RESUMED_IN.name}.json", folder / "resumed", resume=saved)
        yield case("resume", job, "resume", reference=reference, layout=RESUMED_IN, first_step=SAVED_STEP + 1)
    last = saved.with_name(f"checkpoint-{STEPS}")
    out = folder / "exported"
    yield Case("export full", "export", f"ds-etp export {last} {out}", out, reference=reference, compare="weights")
    job = Job("full", CONFIGS / f"{SAVED_IN.name}.json", folder / "unread")
    yield case("unread", job, "", on=False, reference=reference, warns=True)


def _merged(trainer: Trainer, folder: Path) -> Iterator[Case]:
    """The adapters of a split and of an unsplit run, merged by the trainer's own command."""
    assert trainer.merge is not None
    for id, column, job, reference in (
        ("plain merge", "", f"lora-{SAVED_IN.plain}", ""),
        ("export lora", "export", f"lora-{SAVED_IN.name}", "plain merge"),
    ):
        out = folder / f"merged-{job}"
        command = trainer.merge(folder / job / trainer.final, out)
        yield Case(id, column, command, out, reference=reference, compare="weights")


def data_command() -> str:
    """Makes the model and the data sets that all commands name."""
    return "python -m tests.trainers --data"
