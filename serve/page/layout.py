"""Layout and events of the demo page, in Gradio. `Studio` (studio.py) has its logic."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from megadit.models.shared.errors import UserError
from megadit.serve.contract import VideoRequest
from megadit.serve.events import CancelledError, InvalidRequestError, ServiceError, StepDone
from megadit.serve.page import view
from megadit.serve.page.conditioning import ConditioningInputs
from megadit.serve.page.inputs import Adapters, Sampling, Seed, Sizes
from megadit.serve.page.studio import Studio, Take
from megadit.serve.page.uploads import LIFETIME_SECONDS, SECONDS_BETWEEN_SWEEPS, UploadQuota


def show(studio: Studio, *, host: str, port: int) -> None:
    """Serves the page until the process is interrupted."""
    page = build_page(studio)
    launch(page, studio, host=host, port=port)
    try:
        threading.Event().wait()
    finally:
        page.close()


def launch(page: gr.Blocks, studio: Studio, *, host: str, port: int | None) -> str:
    """Starts serving in threads; returns the page's address."""
    quota = Middleware(UploadQuota, folder=studio.uploads, largest=studio.info.limits.max_media_bytes)
    font = ["system-ui", "-apple-system", "Segoe UI", "sans-serif"]  # nothing from other hosts
    _, url, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        allowed_paths=[str(studio.folder)],
        max_file_size=studio.info.limits.max_media_bytes,
        app_kwargs={"middleware": [quota]},
        theme=gr.themes.Soft(primary_hue="indigo", font=font, font_mono=["ui-monospace", "monospace"]),
        css=view.CSS,
        footer_links=[],
        ssr_mode=False,
    )
    return url


def build_page(studio: Studio) -> gr.Blocks:
    """The page: one video, and two side by side."""
    made = "an image" if view.makes_images(studio.info) else "a video"
    os.environ["GRADIO_TEMP_DIR"] = str(studio.uploads)  # components read it when they are created
    kept = (SECONDS_BETWEEN_SWEEPS, LIFETIME_SECONDS)
    with gr.Blocks(title="megadit", analytics_enabled=False, delete_cache=kept) as page:
        gr.Markdown(f"# megadit\nA few words in, {made} out.", elem_id="headline")
        with gr.Tab(f"Make {made}"):
            _VideoTab(studio)
        with gr.Tab("Side by side"):
            _CompareTab(studio)

        def leave(session: gr.Request) -> None:
            studio.cancel(session.session_hash)

        page.unload(leave)
    return page


class _VideoTab:
    """One prompt, one video, and a gallery of earlier ones."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.conditionings, self.current = gr.State([]), gr.State(None)
        with gr.Row(equal_height=False):
            with gr.Column(scale=5, min_width=300, elem_id="inputs"):
                self._lay_out_inputs()
            with gr.Column(scale=6, min_width=300, elem_id="outputs"):
                self._lay_out_outputs()
        self.gallery = gr.Gallery(
            label="Made so far",
            columns=6,
            height="auto",
            allow_preview=False,
            visible=False,
            fit_columns=False,
            show_label=False,
            buttons=[],
            elem_id="gallery",
        )
        self._wire()

    def _lay_out_inputs(self) -> None:
        asks = "what should be seen?" if view.makes_images(self.studio.info) else "what should happen?"
        asks += " Shift+Enter generates."
        self.prompt = gr.Textbox(label="Prompt", lines=2, autofocus=True, placeholder=asks, elem_id="prompt")
        samples = [[text] for text in self.studio.info.examples]
        self.examples = gr.Dataset(
            components=[self.prompt], samples=samples, label="Examples", elem_id="examples", visible=bool(samples)
        )
        self.conditioning = ConditioningInputs(self.studio)
        with gr.Row():
            self.make = gr.Button("Generate", variant="primary", elem_id="make", min_width=100)
            self.cancel = gr.Button("Cancel", elem_id="cancel", interactive=False, min_width=100)
        with gr.Accordion("Settings", open=True, elem_id="settings"):
            self.negative = gr.Textbox(
                label="Negative prompt",
                placeholder="what to steer away from",
                value=self.studio.info.defaults["negative_prompt"],
            )
            self.sizes = Sizes(self.studio, elem_id="size")
            with gr.Row():
                self.sampling = Sampling(self.studio, self.sizes, elem_id="way_of_video")
            self.adapters = Adapters(self.studio)
            with gr.Row():
                self.seed = Seed(elem_id="seed")

    def _lay_out_outputs(self) -> None:
        self.stage = gr.HTML(view.empty_stage(self.studio.info, self.sizes.presets[0]), elem_id="stage")
        self.facts = gr.HTML('<div class="facts"></div>', elem_id="facts")
        with gr.Row():
            self.again = gr.Button("Generate again", elem_id="again", interactive=False, min_width=100)
            self.download = gr.DownloadButton("Download", elem_id="download", interactive=False, min_width=100)

    def _wire(self) -> None:
        shown = [self.stage, self.facts, self.make, self.cancel, self.again, self.download, self.gallery]
        shown += [self.seed.number, self.conditionings, self.current]
        inputs = [self.conditionings, self.prompt, self.negative, self.sizes.radio]
        inputs += [*self.sampling.components, *self.adapters.components, *self.seed.components]
        inputs += self.conditioning.components
        quiet = {"show_progress": "hidden"}
        gr.on([self.make.click, self.prompt.submit], self._start, inputs, shown, **quiet)
        self.examples.click(lambda sample: sample[0], self.examples, self.prompt, **quiet).then(
            self._start, inputs, shown, **quiet
        )
        self.again.click(self._repeat, [self.current, self.conditionings], shown, **quiet)
        self.gallery.select(self._choose, self.conditionings, [*shown, self.prompt], **quiet)
        self.cancel.click(_canceller(self.studio), None, None, **quiet)

    def _start(
        self, session: gr.Request, kept: list[Take], prompt: str, negative: str, size: int, *values: Any
    ) -> Iterator[dict]:
        if not prompt.strip():
            gr.Warning(view.how_to_begin(self.studio.info))
            yield {self.cancel: gr.Button(interactive=False)}
            return
        count = len(self.sampling.components)
        sampling, values = values[:count], values[count:]
        adapters, seed, conditioning = values[:2], values[2:4], values[4:]
        try:
            fields = self.conditioning.of(prompt, *conditioning)
        except UserError as error:
            gr.Warning(str(error))
            yield {self.cancel: gr.Button(interactive=False)}
            return
        request = self.studio.request(
            **fields,
            negative_prompt=negative,
            seed=self.seed.of(*seed),
            **self.sizes.of(size),
            **self.sampling.of(*sampling),
            **self.adapters.of(*adapters),
        )
        if warning := self.studio.info.warning(request):
            gr.Warning(warning)
        yield from self._run(session, request, kept, sampling[0])

    def _repeat(self, session: gr.Request, take: Take, kept: list[Take]) -> Iterator[dict]:
        yield from self._run(session, take.again(), kept, take.variant, note="made again")

    def _choose(self, event: gr.SelectData, kept: list[Take]) -> dict:
        take = kept[event.index]
        return self._finished(take) | {self.prompt: take.request.text}

    def _run(
        self, session: gr.Request, request: VideoRequest, kept: list[Take], variant: str, note: str = ""
    ) -> Iterator[dict]:
        yield {
            self.stage: view.waiting_stage(_size(request)),
            self.facts: view.facts(request, note=note, variant=self.studio.described(variant)),
            self.make: gr.Button(interactive=False),
            self.again: gr.Button(interactive=False),
            self.download: gr.DownloadButton(interactive=False),
            self.cancel: gr.Button(interactive=True),
            self.seed.number: request.seed,
        }
        ended = {self.make: gr.Button(interactive=True), self.cancel: gr.Button(interactive=False)}
        try:
            for event in self.studio.run(session.session_hash, request, variant):
                if isinstance(event, StepDone):
                    yield {self.stage: view.progress_stage(_size(request), event)}
                    continue
                take = self.studio.keep(request, event, variant)
                kept = [take, *kept]
                ended |= self._finished(take, note) | {self.conditionings: kept, self.gallery: _pictures(kept)}
        except (ServiceError, UserError) as error:
            ended |= {self.stage: _failed_stage(request, error)}
        yield ended

    def _finished(self, take: Take, note: str = "") -> dict:
        return {
            self.stage: _finished_stage(take),
            self.facts: _facts_of(self.studio, take, take.again(), note),
            self.again: gr.Button(interactive=True),
            self.download: gr.DownloadButton(value=str(take.path), interactive=True),
            self.seed.number: take.request.seed,
            self.current: take,
        }


class _CompareTab:
    """One prompt and seed with two settings; the second is a student's, if there is one."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        examples = studio.info.examples
        with gr.Row(equal_height=False):
            with gr.Column(scale=3, min_width=300):
                self.prompt = gr.Textbox(label="Prompt", value=examples[0] if examples else "", elem_id="prompt2")
            with gr.Column(scale=2, min_width=300):
                self.seed = Seed(elem_id="seed2")
        self.sizes = Sizes(studio, elem_id="size2")
        with gr.Row():
            self.make = gr.Button("Generate both", variant="primary", elem_id="make2", min_width=100)
            self.cancel = gr.Button("Cancel", elem_id="cancel2", min_width=100)
        self.samplings, self.stages, self.facts = [], [], []
        with gr.Row(equal_height=False):
            _, *others = studio.variants
            other = {"variant": others[0]} if others else {"has_guidance": False}
            sides = [("left", {}), ("right", other)] if others else [("left", other), ("right", {})]
            for side, start in sides:
                with gr.Column(min_width=300):
                    self.samplings.append(Sampling(studio, self.sizes, elem_id=f"way_{side}", **start))
                    empty = view.empty_stage(studio.info, self.sizes.presets[0])
                    self.stages.append(gr.HTML(empty, elem_id=f"stage_{side}"))
                    self.facts.append(gr.HTML('<div class="facts"></div>'))
        inputs = [self.prompt, self.sizes.radio, *self.seed.components]
        inputs += [component for sampling in self.samplings for component in sampling.components]
        shown = [*self.stages, *self.facts, self.seed.number, self.make]
        gr.on([self.make.click, self.prompt.submit], self._start, inputs, shown, show_progress="hidden")
        self.cancel.click(_canceller(studio), None, None, show_progress="hidden")

    def _start(self, session: gr.Request, prompt: str, size: int, *values: Any) -> Iterator[dict]:
        (left, right), seed, sampling = self.samplings, values[:2], values[2:]
        count = len(left.components)
        common = {"prompt": prompt, **self.sizes.of(size)}
        first = self.studio.request(seed=self.seed.of(*seed), **common, **left.of(*sampling[:count]))
        second = self.studio.request(seed=first.seed, **common, **right.of(*sampling[count:]))
        requests, variants = [first, second], [sampling[0], sampling[count]]
        yield {
            **{stage: view.waiting_stage(_size(first)) for stage in self.stages},
            **{
                facts: view.facts(each, variant=self.studio.described(variant))
                for facts, each, variant in zip(self.facts, requests, variants, strict=True)
            },
            self.seed.number: first.seed,
            self.make: gr.Button(interactive=False),
        }
        for side, event in self.studio.run_side_by_side(session.session_hash, requests, variants):
            if isinstance(event, (ServiceError, UserError)):
                yield {self.stages[side]: _failed_stage(first, event)}
            elif isinstance(event, StepDone):
                yield {self.stages[side]: view.progress_stage(_size(first), event)}
            else:
                take = self.studio.keep(requests[side], event, variants[side])
                facts = _facts_of(self.studio, take, take.request)
                yield {self.stages[side]: _finished_stage(take), self.facts[side]: facts}
        yield {self.make: gr.Button(interactive=True)}


def _canceller(studio: Studio) -> Callable[[gr.Request], None]:
    def cancel(session: gr.Request) -> None:
        studio.cancel(session.session_hash)

    return cancel


def _size(request: VideoRequest) -> view.Preset:
    return view.Preset(name="", num_frames=request.num_frames, height=request.height, width=request.width)


def _facts_of(studio: Studio, take: Take, request: VideoRequest, note: str = "") -> str:
    return view.facts(request, take.seconds, note, take.scores, variant=studio.described(take.variant))


def _finished_stage(take: Take) -> str:
    return view.finished_stage(_size(take.request), f"/gradio_api/file={take.path}", take.media_type)


def _failed_stage(request: VideoRequest, error: ServiceError | UserError) -> str:
    """A message for the visitor; addresses and other details go to the log."""
    if isinstance(error, CancelledError):
        return view.message_stage(_size(request), "Cancelled", "Nothing more is computed for it.")
    if isinstance(error, InvalidRequestError):
        return view.message_stage(_size(request), "That did not work", str(error), is_error=True)
    print(f"error: {error}", file=sys.stderr, flush=True)
    text = "The service cannot make it at the moment. Try again in a while."
    return view.message_stage(_size(request), "That did not work", text, is_error=True)


def _pictures(gallery: list[Take]) -> gr.Gallery:
    """Gallery of videos; a click shows one again, with its settings."""
    items = [(str(take.picture), take.request.text) for take in gallery]
    return gr.Gallery(value=items, visible=True, selected_index=None)
