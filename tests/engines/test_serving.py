"""Behaviour of every engine with models and requests."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs

from prism.messages.engine import ActivateEngine, ActivationFailed, Deactivate, Deactivated, Submit
from prism.messages.image_tensors import PromptImage, Tensor
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Cancel, Request
from tests.engines.harness import DeviceUnderTest, request
from tests.engines.subjects import Subject

_ids = (f"r{i}" for i in itertools.count())


def requests_for(
    subject: Subject, model: ModelSpec, count: int = 3, max_tokens: int = 20, seed: int = 1
) -> list[Request]:
    prompts = subject.prompts(count, seed)
    return [request(next(_ids), model.name, p, max_tokens) for p in prompts]


def serve(device: DeviceUnderTest, engine: str, requests: list[Request]) -> list[list[int]]:
    """Submits all at once; returns the outputs, each checked to be whole."""
    device.send(Submit(requests), engine)
    streams = device.finish(*(r.id for r in requests))
    assert [s.failure for s in streams] == [None] * len(streams)
    assert {s.finish_reason for s in streams} == {"length"}
    return [s.token_ids for s in streams]


def test_activation_is_described(device: DeviceUnderTest, engine: str, subject: Subject) -> None:
    model = subject.models[0]
    assert device.fresh_status(engine).model is None
    activated = device.activate(model, engine)
    usage = device.client_usage(engine)
    assert usage is not None
    assert activated.model == model.name
    assert activated.static_bytes == usage.static_bytes >= model.weight_bytes
    assert activated.reserve_bytes == usage.min_bytes >= model.context_length * model.token_bytes
    assert activated.floor_bytes == usage.committed_bytes > 0
    assert activated.quantum_bytes == activated.quantum_tokens * model.token_bytes
    assert activated.stages_s
    status = device.fresh_status(engine)
    assert (status.model, status.kv_mapped_bytes) == (model.name, activated.floor_bytes)
    assert status.available_tokens >= model.context_length


def test_tokens_are_complete_and_batching_changes_nothing(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    requests = requests_for(subject, model, count=12)
    subject.learn(device, engine, requests)
    assert serve(device, engine, requests) == [subject.expected(r) for r in requests]
    status = device.settled_status(lambda s: s.running == 0, engine)
    assert status.output_tokens_total >= 12 * 20
    assert status.prompt_tokens_total >= sum(len(r.prompt_ids) for r in requests)


def test_one_process_serves_one_model_after_another(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    first, second = subject.models
    batches = {m.name: requests_for(subject, m) for m in subject.models}
    outputs: dict[str, list[list[list[int]]]] = {first.name: [], second.name: []}
    for model in (first, second, first, second):
        device.activate(model, engine)
        subject.learn(device, engine, batches[model.name])
        again = [request(next(_ids), model.name, r.prompt_ids, 20) for r in batches[model.name]]
        outputs[model.name].append(serve(device, engine, again))
        device.send(Deactivate(), engine)
        assert device.wait_for(Deactivated, engine).model == model.name
        usage = device.client_usage(engine)
        assert usage is not None
        assert (usage.reserved_bytes, usage.static_bytes, usage.min_bytes) == (0, 0, 0)
    for name, runs in outputs.items():
        assert runs == [[subject.expected(r) for r in batches[name]]] * 2


def test_cancelled_requests_end_and_their_memory_comes_back(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    requests = requests_for(subject, model, count=12, max_tokens=200)
    device.send(Submit(requests), engine)
    device.wait_until(lambda: device.stream(requests[0].id).chunks)
    running, waiting, others = requests[0], requests[-1], requests[1:-1]
    device.send(Cancel([running.id, waiting.id, "unknown"]), engine)
    ended = device.finish(running.id, waiting.id)
    assert [s.finish_reason for s in ended] == ["cancelled", "cancelled"]
    assert len(ended[0].token_ids) < 200
    device.send(Cancel([r.id for r in others]), engine)
    device.finish(*(r.id for r in others))
    status = device.settled_status(lambda s: s.running + s.waiting == 0, engine)
    assert status.pending_prefill_tokens == 0


def test_a_stop_token_ends_the_output(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    whole = requests_for(subject, model, count=1)
    subject.learn(device, engine, whole)
    expected = subject.expected(whole[0])
    stop = expected[7]
    item = request(next(_ids), model.name, whole[0].prompt_ids, 20, stop_token_ids=(stop,))
    device.send(Submit([item]), engine)
    (stream,) = device.finish(item.id)
    assert stream.finish_reason == "stop"
    assert stream.token_ids == expected[: expected.index(stop) + 1]


def test_a_request_over_the_context_fails_for_good(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    prompt = [11] * model.context_length
    item = request(next(_ids), model.name, prompt, 1)
    fits = request(next(_ids), model.name, prompt[:-20], 20)
    device.send(Submit([item, fits]), engine)
    stream, full = device.finish(item.id, fits.id)
    assert stream.failure is not None
    assert (stream.failure.code, stream.failure.retryable) == ("context_length_exceeded", False)
    assert len(full.token_ids) == 20


def test_images_for_a_model_without_them_fail_alone(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    plain = request(next(_ids), model.name, [11] * 20, 5)
    image = PromptImage("0" * 64, ((2, 3),), {"pixel_values": Tensor("float32", (1,), b"1234")})
    shown = structs.replace(plain, id=next(_ids), images=(image,))
    device.send(Submit([shown, plain]), engine)
    refused, served = device.finish(shown.id, plain.id)
    assert refused.failure is not None
    assert (refused.failure.code, refused.failure.retryable) == ("invalid_request_error", False)
    assert refused.failure.message == f"{model.name} does not take images; remove them"
    assert len(served.token_ids) == 5


def test_deactivation_fails_what_runs_so_that_it_is_served_again(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model = subject.models[0]
    device.activate(model, engine)
    requests = requests_for(subject, model, count=12, max_tokens=200)
    device.send(Submit(requests), engine)
    device.wait_until(lambda: device.stream(requests[0].id).chunks)
    device.send(Deactivate(), engine)
    assert device.wait_for(Deactivated, engine).model == model.name
    failures = [s.failure for s in device.finish(*(r.id for r in requests))]
    assert {f and (f.code, f.retryable) for f in failures} == {("model_evicted", True)}
    assert device.fresh_status(engine).model is None
    device.activate(model, engine)
    again = requests_for(subject, model, seed=9)
    subject.learn(device, engine, again)
    assert serve(device, engine, again) == [subject.expected(r) for r in again]


def test_requests_for_another_model_are_refused(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model, other = subject.models
    early = request(next(_ids), model.name, [11, 12], 2)
    device.send(Submit([early]), engine)
    device.finish(early.id)
    device.activate(model, engine)
    wrong = request(next(_ids), other.name, [11, 12], 2)
    right = request(next(_ids), model.name, [11, 12], 2)
    device.send(Submit([wrong, right]), engine)
    device.finish(wrong.id, right.id)
    for stream in (device.stream(early.id), device.stream(wrong.id)):
        assert stream.failure is not None
        assert (stream.failure.code, stream.failure.retryable) == ("model_not_active", True)
    assert len(device.stream(right.id).token_ids) == 2


def test_a_second_activation_is_refused_and_the_first_stays(
    device: DeviceUnderTest, engine: str, subject: Subject
) -> None:
    model, other = subject.models
    device.activate(model, engine)
    device.send(ActivateEngine(model=other), engine)
    failed = device.wait_for(ActivationFailed, engine)
    assert failed.model == other.name
    assert "deactivate" in failed.message
    items = requests_for(subject, model, count=1, max_tokens=4)
    assert len(serve(device, engine, items)[0]) == 4


def test_deactivating_nothing_is_answered(device: DeviceUnderTest, engine: str) -> None:
    device.send(Deactivate(), engine)
    assert device.wait_for(Deactivated, engine).model == ""


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1 not msgpack"], [b"\x81\xa4type\xa4Wrong"], [b"a", b"b"]]
)
def test_malformed_messages_are_dropped(
    device: DeviceUnderTest, engine: str, frames: list[bytes]
) -> None:
    device.send_raw(frames, engine)
    device.send(Deactivate(), engine)
    device.wait_for(Deactivated, engine)
    assert "malformed" in device.engine_log(engine)
