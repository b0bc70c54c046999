"""Inputs of the page: variant, size, sampling, adapters, seed."""

from typing import Any

import gradio as gr

from megadit.serve.page import view
from megadit.serve.page.studio import Studio


class Sizes:
    """The choice among presets, with an estimated time for each."""

    def __init__(self, studio: Studio, *, elem_id: str) -> None:
        self._studio = studio
        self.presets = view.presets(studio.info)
        defaults = studio.info.defaults
        labels = self.labels(studio.first_variant, defaults["num_steps"], defaults["guidance"])
        self.radio = gr.Radio(labels, value=0, label="Size", elem_id=elem_id, min_width=100)

    def labels(self, variant: str, steps: float, guidance: float) -> list[tuple[str, int]]:
        """(label, index) of each preset, for this variant, number of steps and guidance scale."""
        seconds = [self._seconds(each, variant, int(steps), float(guidance)) for each in self.presets]
        return [(each.label(seconds[place]), place) for place, each in enumerate(self.presets)]

    def follow(self, variant: gr.Radio, *sliders: gr.Slider) -> None:
        """Update the times whenever steps or guidance change."""
        events = [slider.release for slider in sliders]
        gr.on(events, self.labelled, [variant, *sliders], self.radio, show_progress="hidden")

    def labelled(self, variant: str, steps: float, guidance: float) -> gr.Radio:
        return gr.Radio(choices=self.labels(variant, steps, guidance))

    def of(self, place: int) -> dict[str, int]:
        return self.presets[place].size

    def _seconds(self, preset: view.Preset, variant: str, steps: int, guidance: float) -> float:
        request = self._studio.request(
            prompt="", seed=0, variant=variant, num_steps=steps, guidance=guidance, **preset.size
        )
        return self._studio.estimate(request, variant)


class Sampling:
    """The variant, and the inputs that follow it: steps, guidance, sampler, and a slider for each bounded setting."""

    def __init__(
        self, studio: Studio, sizes: Sizes, *, elem_id: str, variant: str | None = None, has_guidance: bool = True
    ) -> None:
        """Without `guidance` the slider begins at the lowest scale."""
        self._studio, self._sizes = studio, sizes
        variant = variant or studio.first_variant
        defaults = studio.variants[variant].defaults
        self.variant = gr.Radio(
            list(studio.variants),
            value=variant,
            label="Calls",
            elem_id=elem_id,
            visible=studio.has_variants,
            min_width=100,
        )
        self.steps = gr.Slider(1, self._most_steps(), value=defaults["num_steps"], step=1, label="Steps")
        low, high = studio.variants[variant].scales
        guidance = defaults["guidance"] if has_guidance else low
        self.guidance = gr.Slider(low, high, value=guidance, step=0.5, label="Guidance")
        self.sampler = gr.Dropdown(list(studio.info.samplers), value=defaults["sampler"], label="Sampler")
        self.sliders = [
            gr.Slider(about.low, about.high, value=value, label=name.replace("_", " ").capitalize())
            for (name, about), value in zip(view.SLIDERS.items(), self._slid(variant).values(), strict=True)
        ]
        sizes.follow(self.variant, self.steps, self.guidance)
        self.variant.change(self._chosen, self.variant, [*self.components[1:], sizes.radio], show_progress="hidden")

    @property
    def components(self) -> list[Any]:
        return [self.variant, self.steps, self.guidance, self.sampler, *self.sliders]

    def of(self, variant: str, steps: float, guidance: float, sampler: str, *moved: float) -> dict[str, Any]:
        """Settings of the request. Sliders at their defaults are left out: another sampler may have other defaults."""
        usual = self._slid(variant)
        settings = dict(zip(usual, map(float, moved), strict=True))
        settings = {name: value for name, value in settings.items() if value != usual[name]}
        chosen = {"variant": variant, "num_steps": int(steps), "guidance": float(guidance), "sampler": sampler}
        return chosen | settings

    def _chosen(self, variant: str) -> list[Any]:
        """Updates of all components except the first after a change of the variant."""
        chosen = self._studio.variants[variant]
        steps, guidance, sampler = (chosen.defaults[name] for name in ("num_steps", "guidance", "sampler"))
        low, high = chosen.scales
        scale = gr.Slider(minimum=low, maximum=high, value=guidance)
        return [steps, scale, sampler, *self._slid(variant).values(), self._sizes.labelled(variant, steps, guidance)]

    def _slid(self, variant: str) -> dict[str, float]:
        """Values of a variant's sliders."""
        defaults = self._studio.variants[variant].defaults
        return {name: float(defaults.get(name, about.default)) for name, about in view.SLIDERS.items()}

    def _most_steps(self) -> int:
        largest = max(each.num_frames * each.height * each.width for each in self._sizes.presets)
        steps = max(each.defaults["num_steps"] for each in self._studio.variants.values())
        return max(1, min(10 * steps, self._studio.info.limits.max_work // largest))


class Adapters:
    """Choice of adapters for the video, and their scale."""

    def __init__(self, studio: Studio) -> None:
        with gr.Row(visible=studio.info.adapters is not None):
            self.names = gr.Dropdown(
                studio.adapters(), label="Adapters", multiselect=True, elem_id="adapters", min_width=100
            )
            self.scale = gr.Slider(-2, 2, value=1, label="How much of them", elem_id="scale", min_width=100)
        self.names.focus(lambda: gr.Dropdown(choices=studio.adapters()), None, self.names, show_progress="hidden")

    @property
    def components(self) -> list[Any]:
        return [self.names, self.scale]

    @staticmethod
    def of(names: list[str] | None, scale: float) -> dict[str, Any]:
        return {"adapters": tuple(f"{name}:{scale!r}" for name in names)} if names else {}


class Seed:
    """A seed, random for each video or fixed."""

    def __init__(self, *, elem_id: str) -> None:
        self.number = gr.Number(value=0, precision=0, label="Seed", elem_id=elem_id, min_width=100)
        self.is_random = gr.Checkbox(value=True, label="New seed every time", elem_id=f"{elem_id}_random")

    @property
    def components(self) -> list[Any]:
        return [self.number, self.is_random]

    @staticmethod
    def of(number: float | None, is_random: bool) -> int | None:
        return None if is_random else int(number or 0)
