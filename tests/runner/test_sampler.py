"""The batched sampler: every request field against slow arithmetic, and draws that do not know their neighbours."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch

from freetoken.kernels.dispatch import Choice
from freetoken.kernels.token_mask import TokenMask
from freetoken.runner.penalties import IN_PROMPT, MAX_COUNT, TokenCounts
from freetoken.runner.sampler import SampleOutput, SamplePlan, Sampler
from freetoken.runner.staging import HostRing
from freetoken.sampling_params import Grammar, SamplingParams
from freetoken.scheduler.request import Req, ScheduleBatch, Slice

VOCAB = 257


def choice(op: str, impl: str) -> Choice:
    return Choice(op, "", impl, "the test says so")


def make_sampler(max_rows: int = 8, vocab: int = VOCAB, known: int | None = None, default_seed: int = 0) -> Sampler:
    return Sampler(
        max_rows=max_rows, vocab_size=vocab, sample_vocab=known or vocab, device="cpu", default_seed=default_seed
    )


def make_req(row: int = 0, *, ids: list[int] | None = None, prompt_len: int | None = None, **asked: object) -> Req:
    history = [1, 2, 3] if ids is None else ids
    sampling = SamplingParams(**asked)  # type: ignore[arg-type]
    return Req(
        rid=f"r{row}",
        ids=history,
        prompt_len=len(history) if prompt_len is None else prompt_len,
        sampling=sampling,
        max_new_tokens=100,
        stop_ids=frozenset({0}),
        seed=sampling.seed if sampling.seed is not None else 11 + row,
        row=row,
    )


def batch_of(reqs: list[Req], out_index: int = 0) -> ScheduleBatch:
    return ScheduleBatch(0, [Slice(req, 0, 1, decode=True, sample=True, out_index=out_index) for req in reqs], [])


def step(
    sampler: Sampler, reqs: list[Req], logits: torch.Tensor, out_index: int = 0
) -> tuple[SamplePlan, SampleOutput]:
    plan = sampler.plan(batch_of(reqs, out_index))
    return plan, sampler.sample(logits.clone(), plan)


def logits_for(count: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


# --- independence ----------------------------------------------------------------------------------------------------

ASKED: list[dict[str, object]] = [
    {"seed": 5},
    {"seed": 6, "temperature": 0.7, "top_k": 20},
    {"seed": 7, "top_p": 0.8},
    {"seed": 8, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"seed": 9, "top_k": 300, "top_p": 0.95, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}},
    {"temperature": 0.0, "frequency_penalty": 1.0},
]


def generate(asked: dict[str, object], row: int, neighbours: list[dict[str, object]], steps: int = 50) -> list[int]:
    """Ids of one request whose logits depend on its own last id, placed after its neighbours in the batch."""
    sampler = make_sampler()
    others = [make_req(at if at < row else at + 1, **other) for at, other in enumerate(neighbours)]
    req = make_req(row, **{"seed": 1, **asked})
    place = len(others) // 2
    reqs = [*others[:place], req, *others[place:]]
    sampler.register(reqs)
    table, last, ids = logits_for(VOCAB, seed=1), 3, []
    for index in range(steps):
        logits = logits_for(len(reqs), seed=1000 + index)
        logits[place] = table[last]
        _, out = step(sampler, reqs, logits, index)
        last = int(out.ids[place])
        ids.append(last)
    return ids


@pytest.mark.parametrize("asked", ASKED)
def test_ids_do_not_depend_on_row_or_neighbours(asked: dict[str, object]) -> None:
    alone = generate(asked, 0, [])
    assert generate(asked, 5, ASKED) == alone
    assert generate(asked, 3, [{"temperature": 0.0}, {"seed": 99, "top_p": 0.3}]) == alone
    assert len(set(alone)) > 5


def test_seeds_decide_the_draw() -> None:
    sampler = make_sampler()
    reqs = [make_req(row, seed=seed) for row, seed in enumerate([1, 1, 2, -1, 2**63 - 1])]
    sampler.register(reqs)
    logits = logits_for(1, spread=0.1).expand(5, -1)
    drawn = np.array([step(sampler, reqs, logits, index)[1].ids.tolist() for index in range(30)])
    assert (drawn[:, 0] == drawn[:, 1]).all()
    for other in (2, 3, 4):
        assert (drawn[:, 0] != drawn[:, other]).sum() > 20
    assert len(set(drawn[:, 0].tolist())) > 15


def test_the_server_seed_varies_only_requests_without_their_own() -> None:
    logits = logits_for(2, spread=0.1)
    drawn = []
    for default_seed in (0, 1, 1):
        sampler = make_sampler(default_seed=default_seed)
        reqs = [make_req(0, seed=3), make_req(1)]
        sampler.register(reqs)
        drawn.append([step(sampler, reqs, logits, index)[1].ids.tolist() for index in range(20)])
    first, second, again = (np.array(ids) for ids in drawn)
    assert (second == again).all() and (first[:, 0] == second[:, 0]).all()
    assert (first[:, 1] != second[:, 1]).sum() > 10


# --- edits -----------------------------------------------------------------------------------------------------------


def penalised_row(row: list[float], prompt: list[int], output: list[int], asked: dict[str, float]) -> list[float]:
    result = []
    for token, logit in enumerate(row):
        if token in prompt or token in output:
            factor = asked.get("repetition_penalty", 1.0)
            logit = logit / factor if logit > 0 else logit * factor
        logit -= output.count(token) * asked.get("frequency_penalty", 0.0)
        logit -= asked.get("presence_penalty", 0.0) if token in output else 0.0
        result.append(logit)
    return result


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    ],
)
def test_penalties_follow_history_and_draws(asked: dict[str, float]) -> None:
    """Row 1 starts with outputs, as after a retraction; nothing but the device knows the ids drawn from then on."""
    sampler = make_sampler()
    prompt, output = [4, 4, 9, 200], [9, 17, 17]
    reqs = [make_req(0, temperature=0.0), make_req(1, ids=prompt + output, prompt_len=4, temperature=0.0, **asked)]
    sampler.register(reqs)
    for index in range(25):
        logits = logits_for(2, seed=index // 5)
        _, out = step(sampler, reqs, logits, 3 + index)
        expected = penalised_row(logits[1].tolist(), prompt, output, asked)
        assert out.ids[0] == logits[0].argmax()
        assert int(out.ids[1]) == int(np.argmax(expected))
        output.append(int(out.ids[1]))
    assert len(set(output)) < len(output)


def test_a_row_taken_over_forgets_its_last_request() -> None:
    sampler = make_sampler()
    old = make_req(2, ids=[5, 6, 6], prompt_len=1, presence_penalty=1.0)
    sampler.register([old])
    assert sampler.counts.words[2, 6] == 2 and sampler.counts.words[2, 5] == IN_PROMPT
    sampler.register([make_req(2, ids=[8], presence_penalty=1.0)])
    assert sampler.counts.words[2].nonzero().flatten().tolist() == [8]


def test_counts_stop_at_their_limit() -> None:
    counts = TokenCounts(2, 10, torch.device("cpu"))
    counts.reset(1, [3] + [3] * (MAX_COUNT + 50) + [4], 1)
    assert counts.words[1, 3] == IN_PROMPT | MAX_COUNT and counts.words[1, 4] == 1
    counts.add(torch.tensor([1]), torch.tensor([3]))
    counts.add(torch.tensor([1, 0]), torch.tensor([4, 9]))
    assert counts.words[1, 3] == IN_PROMPT | MAX_COUNT and counts.words[1, 4] == 2 and counts.words[0, 9] == 1


def test_logit_bias_moves_ids() -> None:
    sampler = make_sampler(max_rows=3)
    reqs = [
        make_req(0, temperature=0.0, logit_bias={100: 100.0}),
        make_req(1, temperature=0.0, logit_bias={9: -100.0, 10: 1.5}),
        make_req(2, temperature=0.0),
    ]
    sampler.register(reqs)
    logits = torch.zeros(3, VOCAB)
    logits[:, 9], logits[:, 10], logits[:, 11] = 3.0, 1.0, 2.0
    plan, out = step(sampler, reqs, logits)
    assert out.ids.tolist() == [100, 10, 9] and plan.path == "argmax+edits"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_ids_are_banned_below_the_minimum_length(ignore_eos: bool) -> None:
    sampler = make_sampler()
    req = make_req(0, temperature=0.0, min_new_tokens=2, stop_token_ids=(50,), ignore_eos=ignore_eos)
    sampler.register([req])
    logits = torch.zeros(1, VOCAB)
    logits[0, 0], logits[0, 50], logits[0, 60] = 9.0, 8.0, 7.0
    assert [int(step(sampler, [req], logits, index)[1].ids) for index in range(4)] == [60, 60, 0, 0]


def test_bans_hold_against_bias_and_all_ids_banned_still_draws() -> None:
    sampler = make_sampler(vocab=3)
    req = make_req(0, ids=[1], min_new_tokens=5, stop_token_ids=(0, 1, 2), logit_bias={1: 100.0})
    sampler.register([req])
    assert step(sampler, [req], torch.zeros(1, 3))[1].ids.tolist() == [0]


def test_edits_come_before_filters() -> None:
    sampler = make_sampler()
    req = make_req(0, top_k=1 + 1, seed=1, logit_bias={200: 50.0, 201: 50.0})
    sampler.register([req])
    drawn = {int(step(sampler, [req], logits_for(1), index)[1].ids) for index in range(40)}
    assert drawn == {200, 201}


def test_surplus_ids_are_never_drawn_nor_listed() -> None:
    sampler = make_sampler(known=250)
    reqs = [make_req(0, logprobs=20), make_req(1, temperature=0.0, logprobs=20), make_req(2, logit_bias={255: 100.0})]
    sampler.register(reqs)
    logits = logits_for(3)
    logits[:, 250:] = 60.0
    for index in range(20):
        plan, out = step(sampler, reqs, logits, index)
        assert (out.ids < 250).all()
    entries = plan.entries(out.device_tensors())
    assert entries is not None and entries[2] is None
    for entry in entries[:2]:
        assert entry is not None and len(entry.top_ids) == 20 and max(entry.top_ids) < 250
        assert entry.top_logprobs[0] > -10.0


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    sampler = make_sampler()
    req = make_req(0, temperature=temperature, seed=2)
    sampler.register([req])
    logits = logits_for(1, spread=3.0)
    drawn = {int(step(sampler, [req], logits, index)[1].ids) for index in range(20)}
    assert drawn == {int(logits.argmax())} if temperature < 1 else len(drawn) > 10


def test_tiny_and_nearly_whole_top_p() -> None:
    sampler = make_sampler()
    reqs = [make_req(0, top_p=1e-300, seed=4), make_req(1, top_p=1.0 - 1e-12, seed=4)]
    sampler.register(reqs)
    logits = logits_for(1).expand(2, -1)
    drawn = np.array([step(sampler, reqs, logits, index)[1].ids.tolist() for index in range(20)])
    assert set(drawn[:, 0]) == {int(logits[0].argmax())} and len(set(drawn[:, 1])) > 5


# --- plans -----------------------------------------------------------------------------------------------------------


def test_plans_skip_what_nobody_asked_for() -> None:
    sampler = make_sampler()
    reqs = [
        make_req(0, temperature=0.0),
        make_req(1, top_k=1),
        make_req(2),
        make_req(3, top_k=9),
        make_req(4, top_p=0.5),
    ]
    reqs += [make_req(5, min_p=0.5), make_req(6, temperature=0.0, presence_penalty=1.0)]
    sampler.register(reqs)

    def plan(*rows: int) -> SamplePlan:
        return sampler.plan(batch_of([reqs[row] for row in rows]))

    assert plan(0, 1) == SamplePlan(2) and plan(0, 1).path == "argmax"
    assert plan().size == 0 and sampler.sample(torch.zeros(0, VOCAB), plan()).ids.shape == (0,)
    assert plan(0, 6).path == "argmax+edits"
    params = plan(0, 2).params
    assert params is not None and params.has_greedy
    assert not (params.has_top_k or params.has_top_p or params.has_min_p)
    params = plan(3).params
    assert params is not None and params.max_top_k == 9 and params.all_top_k and not params.has_greedy
    params = plan(3, 4, 5).params
    assert params is not None and params.has_top_k and params.has_top_p and params.has_min_p and not params.all_top_k


def test_only_slices_that_sample_count() -> None:
    sampler = make_sampler()
    reqs = [make_req(0, temperature=0.0), make_req(1, temperature=0.0, logprobs=0), make_req(2, temperature=0.0)]
    sampler.register(reqs)
    chunk = Slice(reqs[0], 0, 2, decode=False, sample=False)
    last = Slice(reqs[1], 0, 3, decode=False, sample=True)
    plan = sampler.plan(ScheduleBatch(1, [Slice(reqs[2], 3, 1, True, True, 1)], [chunk, last]))
    assert plan.size == 2 and plan.tops == (-1, 0)


def test_a_later_plan_leaves_an_earlier_one_alone() -> None:
    sampler = make_sampler()
    reqs = [make_req(0, seed=1, presence_penalty=1.0), make_req(1, seed=2, top_k=5)]
    sampler.register(reqs)
    logits = logits_for(2)
    plans = [sampler.plan(batch_of(reqs, index)) for index in range(6)]
    late = [sampler.sample(logits.clone(), plan).ids.tolist() for plan in plans]
    sampler.register(reqs)
    assert late == [step(sampler, reqs, logits, index)[1].ids.tolist() for index in range(6)]


def test_uploads_keep_values_and_dtypes() -> None:
    arrays = [
        np.arange(3, dtype=np.int64),
        np.array([1.5], np.float32),
        np.array([], np.int64),
        np.arange(5, dtype=np.int32),
    ]
    sent = HostRing(torch.device("cpu")).send(arrays)
    for array, tensor in zip(arrays, sent):
        assert tensor.numpy().dtype == array.dtype and tensor.tolist() == array.tolist()


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="sample_vocab 300"):
        make_sampler(known=300)


# --- log-probabilities -----------------------------------------------------------------------------------------------


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    norm = top + math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - norm for x in row]


def test_output_logprobs_are_of_the_raw_model_distribution() -> None:
    sampler = make_sampler()
    reqs = [
        make_req(0, logprobs=3, temperature=0.3, presence_penalty=2.0, logit_bias={5: 30.0}, seed=1),
        make_req(1),
        make_req(2, logprobs=0, temperature=0.0),
        make_req(3, logprobs=1, top_k=2),
    ]
    sampler.register(reqs)
    logits = logits_for(4)
    plan, out = step(sampler, reqs, logits)
    entries = plan.entries([tensor.clone() for tensor in out.device_tensors()])
    assert entries is not None and entries[1] is None
    for place, top in ((0, 3), (2, 0), (3, 1)):
        entry, expected = entries[place], log_softmax(logits[place].tolist())
        assert entry is not None and entry.id == out.ids[place]
        assert entry.logprob == pytest.approx(expected[entry.id], abs=1e-5)
        best = sorted(range(VOCAB), key=lambda i: -expected[i])[:top]
        assert entry.top_ids == best and entry.top_logprobs == pytest.approx([expected[i] for i in best], abs=1e-5)
    assert out.ids[0] == 5


def test_no_logprobs_no_entries() -> None:
    sampler = make_sampler()
    req = make_req(0)
    sampler.register([req])
    plan, out = step(sampler, [req], logits_for(1))
    assert plan.entries(out.device_tensors()) is None and len(out.device_tensors()) == 1


def test_top_logprobs_break_ties_by_id_and_stay_finite() -> None:
    sampler = make_sampler(vocab=12)
    req = make_req(0, temperature=0.0, logprobs=12)
    sampler.register([req])
    logits = torch.tensor([[0.0, -0.0, 1.0, 0.0, 1.0, -1.0, -1.0, 1.0, 0.0, -0.0, float("-inf"), 1.0]])
    plan, out = step(sampler, [req], logits)
    entry = (plan.entries(out.device_tensors()) or [None])[0]
    assert entry is not None and entry.top_ids == [2, 4, 7, 11, 0, 1, 3, 8, 9, 5, 6, 10]
    assert entry.top_logprobs[-1] == -9999.0
    plan, out = step(sampler, [req], torch.full((1, 12), float("nan")))
    entry = (plan.entries(out.device_tensors()) or [None])[0]
    assert entry is not None and entry.logprob == -9999.0 and set(entry.top_logprobs) == {-9999.0}


@pytest.mark.parametrize("top", [0, 4])
@pytest.mark.parametrize("length", [1, 63, 130])
def test_prompt_logprobs(length: int, top: int) -> None:
    sampler = make_sampler(known=250)
    logits = logits_for(length)
    targets = torch.arange(length) * 5 % VOCAB  # surplus ids too: a prompt may hold them
    pieces = sampler.prompt_logprobs(logits, targets, top)
    entries = sampler.prompt_entries(targets.tolist(), pieces, top)
    for row, entry in enumerate(entries):
        values = logits[row].tolist()
        known = log_softmax(values[:250])
        expected = values[entry.id] + known[0] - values[0]
        assert entry.id == targets[row] and entry.logprob == pytest.approx(expected, abs=1e-5)
        assert entry.top_ids == sorted(range(250), key=lambda i: -known[i])[:top]
        assert len(entry.top_logprobs) == top


@pytest.mark.gpu
def test_a_step_never_waits_for_the_gpu() -> None:
    sampler = Sampler(max_rows=8, vocab_size=50_000, sample_vocab=49_990, device="cuda", default_seed=0)
    reqs = [make_req(row, **{**asked, "logprobs": 2, "min_new_tokens": 9}) for row, asked in enumerate(ASKED)]
    logits = logits_for(len(reqs), 50_000).cuda()
    sampler.register(reqs)
    outs = [sampler.sample(logits.clone(), sampler.plan(batch_of(reqs, 0)))]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs += [sampler.sample(logits.clone(), sampler.plan(batch_of(reqs, index))) for index in range(1, 4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(((out.ids >= 0) & (out.ids < 49_990)).all() for out in outs)


# --- token masks -----------------------------------------------------------------------------------------------------


def masked_req(row: int, **asked: object) -> Req:
    req = make_req(row, grammar=Grammar(kind="regex", text="a"), **asked)
    req.constraint = cast(Any, object())  # the sampler asks only whether there is one
    return req


def masks_of(*allowed: list[int], vocab: int = VOCAB) -> np.ndarray:
    masks = np.zeros((len(allowed), (vocab + 31) // 32), dtype=np.uint32)
    for mask, ids in zip(masks, allowed):
        for token in ids:
            mask[token // 32] |= np.uint32(1 << (token % 32))
    return masks.view(np.int32)


def masked_step(
    sampler: Sampler, reqs: list[Req], logits: torch.Tensor, masks: np.ndarray, index: int = 0
) -> SampleOutput:
    plan = sampler.plan(batch_of(reqs, index))
    sent = sampler.send_masks(masks)
    masks.fill(0)
    return sampler.sample(logits.clone(), plan, sent)


def use(sampler: Sampler, impl: str) -> Sampler:
    """The sampler with the kernels of a GPU where ``impl`` is ``triton``."""
    sampler.choice = choice("sample", impl)
    sampler._mask = TokenMask(choice("token_mask", impl))
    return sampler


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_only_allowed_ids_are_drawn_whatever_else_is_asked(impl: str) -> None:
    wishes: list[dict[str, object]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 50},
        {"top_p": 0.3},
        {"min_p": 0.9},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 2.0, "logit_bias": {7: 100.0}},
        {"repetition_penalty": 2.0, "min_new_tokens": 9, "logprobs": 2},
    ]
    sampler = use(make_sampler(), impl)
    reqs = [masked_req(row, seed=row, **wish) for row, wish in enumerate(wishes)]
    sampler.register(reqs)
    draw = np.random.default_rng()
    for index in range(3 if impl == "triton" else 20):
        allowed = [sorted(draw.choice(VOCAB, size=draw.integers(1, 4), replace=False).tolist()) for _ in reqs]
        logits = logits_for(len(reqs), seed=index, spread=9.0)
        ids = masked_step(sampler, reqs, logits, masks_of(*allowed), index).ids.tolist()
        assert all(token in ids_of for token, ids_of in zip(ids, allowed))
        best = max(allowed[0], key=lambda token, row=logits[0]: float(row[token]))
        assert ids[0] == best


def test_rows_without_a_mask_are_drawn_as_ever() -> None:
    sampler, plain = make_sampler(), make_sampler()
    reqs = [make_req(0, seed=1), masked_req(1, seed=2), make_req(2, seed=3, top_k=9)]
    sampler.register(reqs)
    plain.register(reqs)
    logits = logits_for(3, seed=4)
    mixed = masked_step(sampler, reqs, logits, masks_of([5])).ids.tolist()
    assert mixed[1] == 5
    assert [mixed[0], mixed[2]] == step(plain, [reqs[0], reqs[2]], logits[[0, 2]])[1].ids.tolist()


def test_a_mask_that_allows_everything_changes_nothing() -> None:
    sampler = make_sampler()
    req, twin = masked_req(0, seed=5, top_p=0.9), make_req(1, seed=5, top_p=0.9)
    sampler.register([req, twin])
    logits = logits_for(1, seed=6)
    full = np.full((1, (VOCAB + 31) // 32), -1, dtype=np.int32)
    assert masked_step(sampler, [req], logits, full).ids.tolist() == step(sampler, [twin], logits)[1].ids.tolist()


def test_a_minimum_length_is_left_to_the_masks() -> None:
    sampler = make_sampler()
    req = masked_req(0, temperature=0.0, min_new_tokens=5)
    sampler.register([req])
    assert masked_step(sampler, [req], logits_for(1), masks_of([0])).ids.tolist() == [0]


def test_log_probabilities_are_those_of_the_model() -> None:
    sampler = make_sampler()
    req = masked_req(0, temperature=0.0, logprobs=3)
    sampler.register([req])
    logits = logits_for(1, seed=9)
    plan = sampler.plan(batch_of([req]))
    assert plan.path == "argmax+edits"
    out = sampler.sample(logits.clone(), plan, sampler.send_masks(masks_of([11])))
    (entry,) = plan.entries(out.device_tensors()) or [None]
    assert entry is not None and entry.id == 11
    expected = logits.log_softmax(-1)[0]
    assert entry.logprob == pytest.approx(float(expected[11]), abs=1e-5)
    assert entry.top_ids == expected.topk(3).indices.tolist()
