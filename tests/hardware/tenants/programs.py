"""Programs as users run them, in plain PyTorch: training, decoding tokens, and training that waits for its data."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from tests.hardware.tenant import begin_at, listen, say
from tests.hardware.tenants.frameworks import torch_module

BATCH, SIDE, CLASSES = 64, 224, 1000
WARM_UP = 5  # steps
PROFILED = 5  # steps
ANNOTATIONS = ("ProfilerStep", "Optimizer.", "## ")  # ranges of the profiler, which are no kernels

Step = Callable[[], Any]


def resnet(torch: Any) -> Any:
    """Return a ResNet-50: torchvision's if that can be imported, otherwise the same layers in plain PyTorch."""
    try:
        return importlib.import_module("torchvision.models").resnet50()
    except Exception:  # an installed torchvision may not fit this PyTorch
        return plain_resnet(torch)


def plain_resnet(torch: Any) -> Any:
    nn = torch.nn

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[Any]:
        layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        return [layer, nn.BatchNorm2d(outputs)]

    class Bottleneck(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            first, second = convolution(inputs, width, 1), convolution(width, width, 3, stride)
            self.body = nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *convolution(width, 4 * width, 1))
            same = inputs == 4 * width and stride == 1
            self.beside = nn.Identity() if same else nn.Sequential(*convolution(inputs, 4 * width, 1, stride))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.beside(x))

    layers: list[Any] = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def training(torch: Any, device: str = "cuda", batch: int = BATCH, side: int = SIDE) -> Step:
    """Return a step of training ResNet-50 in bfloat16."""
    model = resnet(torch).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def decoding(
    torch: Any, device: str = "cuda", width: int = 2048, layers: int = 16, heads: int = 16, room: int = 512
) -> Step:
    """Return a step that decodes one token of each of 4 sequences, with random weights and a cache of keys."""
    nn, functional, batch, words = torch.nn, torch.nn.functional, 4, 32000
    kind: dict[str, Any] = {"device": device, "dtype": torch.float16 if device == "cuda" else torch.float32}

    class Layer(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width, **kind) for _ in range(2)])
            self.attention, self.output = nn.Linear(width, 3 * width, **kind), nn.Linear(width, width, **kind)
            self.up, self.down = nn.Linear(width, 4 * width, **kind), nn.Linear(4 * width, width, **kind)
            shape = (batch, heads, room, width // heads)
            self.keys, self.values = torch.zeros(shape, **kind), torch.zeros(shape, **kind)

        def forward(self, x: Any, at: int) -> Any:
            parts = self.attention(self.norms[0](x)).view(batch, 1, 3, heads, width // heads)
            query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
            self.keys[:, :, at : at + 1], self.values[:, :, at : at + 1] = key, value
            seen = functional.scaled_dot_product_attention(
                query, self.keys[:, :, : at + 1], self.values[:, :, : at + 1]
            )
            x = x + self.output(seen.transpose(1, 2).reshape(batch, 1, width))
            return x + self.down(functional.gelu(self.up(self.norms[1](x))))

    embedding = nn.Embedding(words, width, **kind)
    stack, head = [Layer() for _ in range(layers)], nn.Linear(width, words, **kind)
    state = {"token": torch.zeros(batch, 1, dtype=torch.long, device=device), "at": 0}

    def step() -> None:
        with torch.no_grad():
            x = embedding(state["token"])
            for layer in stack:
                x = layer(x, state["at"])
            state["token"] = head(x)[:, -1:].argmax(-1)
            state["token"][0, 0].item()
        state["at"] = (state["at"] + 1) % room

    return step


def stalling(torch: Any, device: str = "cuda", batch: int = BATCH, side: int = SIDE) -> Step:
    """Return a step of training after which the program waits for data as long as the step takes."""
    step = training(torch, device, batch, side)
    for _ in range(WARM_UP):
        step()
    begin = time.monotonic()
    for _ in range(WARM_UP):
        step()
    stall_s = (time.monotonic() - begin) / WARM_UP

    def stalled() -> None:
        time.sleep(stall_s)
        step()

    return stalled


PROGRAMS: dict[str, Callable[[Any], Step]] = {"train": training, "decode": decoding, "loader": stalling}


def kernel_time(torch: Any, step: Step) -> float:
    """Return the device time of one step in seconds: the sum of its kernels' durations, which CUPTI measures."""
    profiler = importlib.import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if "CUDA" in str(event.device_type) and not event.name.startswith(ANNOTATIONS)
    ]
    return covered(spans) / 1e6 / PROFILED


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length that intervals cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def profiled(torch: Any, step: Step) -> dict[str, Any]:
    """Return the device time of a step as `kernels_s`; None, and the reason, if this PyTorch cannot measure it."""
    try:
        return {"kernels_s": kernel_time(torch, step) or None, "why": None}
    except Exception as error:  # the profiler may lack a library, or a right
        return {"kernels_s": None, "why": f"{type(error).__name__}: {error}"[:200]}


def program(name: str) -> None:
    """For each line {at, settle_s, run_s} report steps per second; for a line {profile} the device time of a step."""
    torch = torch_module()
    step = PROGRAMS[name](torch)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    say(ready=True, version=str(torch.__version__))
    while True:
        asked = listen()
        if asked.get("profile"):
            say(**profiled(torch, step))
            continue
        begin = begin_at(asked) + asked["settle_s"]
        done, first, now = 0, 0.0, time.monotonic()
        while now < begin + asked["run_s"]:
            step()
            now = time.monotonic()
            if first:
                done += 1
            elif now >= begin:
                first = now
        say(per_s=done / (now - first) if done else 0.0, done=done, from_s=first, to_s=now)
