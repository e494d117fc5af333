"""What work on a CPU really takes of memory, as torch's allocator is asked for it."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

from halfbyte.quant.training_memory import Step


def allocated_by(step: Step) -> int:
    """Bytes of tensors at the peak of the second optimizer step, when the optimizer has its states."""
    optimizer = step.make_optimizer()
    step.run(optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    models = [step.model, *([step.teacher] if step.teacher is not None else [])]
    held = {id(tensor): tensor for model in models for tensor in (*model.parameters(), *model.buffers())}
    before = sum(tensor.numel() * tensor.element_size() for tensor in (*held.values(), *states))
    return before + peak_of(lambda: step.run(optimizer))


def peak_of(run: Callable[[], object]) -> int:
    """Bytes that torch's allocator has given out at most while a function runs, beside what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [one for one in found.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
