"""Experts against obvious references: who is chosen, in what order, and the bits of a row."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.expert_choice import ChoiceRule, ChosenExperts, choose_experts
from shared.kernels.expert_order import order_pairs
from shared.kernels.expert_products import apply_experts
from shared.kernels.expert_products_cpu import ExpertForm, hold_experts
from shared.kernels.products_cpu import CpuProducts
from tests.marks import first_if_interpreted

RULES = {
    "qwen3": ChoiceRule(count=3),
    "not normalised": ChoiceRule(count=2, is_normalised=False, scaling_factor=1.5),
    "deepseek-v2": ChoiceRule(
        count=3, is_normalised=False, num_groups=4, num_chosen_groups=2, judges_by_two=False
    ),
    "deepseek-v3": ChoiceRule(
        count=4, is_sigmoid=True, scaling_factor=2.5, num_groups=4, num_chosen_groups=3
    ),
    "glm": ChoiceRule(count=4, is_sigmoid=True),
    "gpt-oss": ChoiceRule(count=4, is_of_chosen=True),
    "ernie": ChoiceRule(count=3),
}
BIASED = ("deepseek-v3", "glm", "gpt-oss", "ernie")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
NUM_EXPERTS = 12


def indptr_of(num_rows: int, device: torch.device) -> torch.Tensor:
    """Return where requests begin whose rows are the first ones; two of them are padded."""
    return torch.tensor([0, num_rows, num_rows, num_rows], dtype=torch.int32, device=device)


def choose_one(logits: list[float], bias: list[float] | None, rule: ChoiceRule) -> dict[int, float]:
    """Choose a row's experts value by value; expert -> weight, in order of ids."""
    values = torch.tensor(logits, dtype=torch.float64)
    extras = torch.tensor(bias or [0.0] * len(logits), dtype=torch.float64)
    if rule.is_of_chosen:
        values = values + extras
    weighed = values.sigmoid() if rule.is_sigmoid else values.softmax(0)
    choice = (values if rule.is_of_chosen else weighed + extras).tolist()
    scores = weighed.tolist()
    size = len(scores) // rule.num_groups
    groups = [range(i * size, (i + 1) * size) for i in range(rule.num_groups)]
    num_judged = 2 if rule.judges_by_two else 1

    def judge(group: range) -> float:
        return sum(sorted((choice[i] for i in group), reverse=True)[:num_judged])

    best = sorted(groups, key=judge, reverse=True)[: rule.num_chosen_groups]
    allowed = sorted(i for group in best for i in group)
    ids = sorted(sorted(allowed, key=lambda i: -choice[i])[: rule.count])
    total = sum(scores[i] for i in ids) if rule.is_normalised else 1.0
    return {i: scores[i] / total * rule.scaling_factor for i in ids}


@pytest.mark.parametrize("name", RULES)
def test_choice_is_that_of_a_reference(device: torch.device, name: str) -> None:
    rule, num_rows = RULES[name], 9
    logits = torch.randn(2, num_rows, NUM_EXPERTS)
    bias = torch.randn(NUM_EXPERTS) if name in BIASED else None
    chosen = choose_experts(
        logits.to(device),
        None if bias is None else bias.to(device),
        indptr_of(num_rows, device),
        rule,
    )
    for row, values in enumerate(logits.sum(dim=0).tolist()):
        want = choose_one(values, None if bias is None else bias.tolist(), rule)
        assert chosen.ids[row].tolist() == list(want)
        got = chosen.weights[row].cpu()
        torch.testing.assert_close(got, torch.tensor([*want.values()]), rtol=1e-5, atol=1e-6)


def test_weights_of_experts_are_scaled_in_the_end(device: torch.device) -> None:
    rule, num_rows = RULES["qwen3"], 5
    logits = torch.randn(1, num_rows, NUM_EXPERTS).to(device)
    scales = torch.randn(NUM_EXPERTS).to(device)
    plain = choose_experts(logits, None, indptr_of(num_rows - 1, device), rule)
    scaled = choose_experts(logits, None, indptr_of(num_rows - 1, device), rule, None, scales)
    assert torch.equal(scaled.ids, plain.ids)
    live = plain.weights[:-1] * scales[plain.ids[:-1].long()]
    assert torch.equal(scaled.weights[:-1], live) and (scaled.weights[-1] == 0).all()


def test_ties_go_to_the_lower_expert_and_group(device: torch.device) -> None:
    logits = torch.zeros(1, 2, 8)
    logits[0, 1, [3, 5]] = 1.0
    for rule in (
        ChoiceRule(count=3),
        ChoiceRule(count=3, is_sigmoid=True, num_groups=2, num_chosen_groups=1),
    ):
        chosen = choose_experts(logits.to(device), None, indptr_of(2, device), rule)
        assert chosen.ids[0].tolist() == [0, 1, 2]
        assert chosen.ids[1].tolist() == ([0, 3, 5] if rule.num_groups == 1 else [0, 1, 3])


# numpy, which interprets the kernel, warns of what is not a number.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "gpt-oss"])
def test_rows_of_nan_choose_experts_that_exist(device: torch.device, name: str) -> None:
    rule = RULES[name]
    logits = torch.randn(1, 3, NUM_EXPERTS).to(device)
    logits[0, 1] = torch.nan
    alone = choose_experts(logits[:, :1].contiguous(), None, indptr_of(1, device), rule)
    chosen = choose_experts(logits, None, indptr_of(3, device), rule)
    assert torch.equal(chosen.ids[:1], alone.ids) and torch.equal(chosen.weights[:1], alone.weights)
    assert len(set(chosen.ids[1].tolist())) == rule.count
    assert 0 <= int(chosen.ids.min()) and int(chosen.ids.max()) < NUM_EXPERTS


def test_logits_choose_where_their_scores_vanish(device: torch.device) -> None:
    """The best logits differ by 1e-6 of them, and others are too low to have a score at all."""
    logits = torch.tensor([[[100.0, -200.0, 100.00001, -100.0, -99.0, 100.00002]]])
    rule = ChoiceRule(count=4, is_of_chosen=True)
    chosen = choose_experts(logits.to(device), None, indptr_of(1, device), rule)
    assert chosen.ids.tolist() == [[0, 2, 4, 5]]
    assert chosen.weights[0, 2] == 0 and float(chosen.weights.sum()) == pytest.approx(1)


def test_padding_chooses_nobody(device: torch.device) -> None:
    chosen = choose_experts(
        torch.randn(1, 5, NUM_EXPERTS).to(device), None, indptr_of(3, device), RULES["glm"]
    )
    assert (chosen.ids[3:] == NUM_EXPERTS).all() and (chosen.weights[3:] == 0).all()
    assert (chosen.ids[:3] < NUM_EXPERTS).all() and (chosen.weights[:3] > 0).all()


@pytest.mark.parametrize("name", RULES)
def test_ids_may_be_left_in_memory_of_others(device: torch.device, name: str) -> None:
    """The first rows of a layer's place get them; nothing else is touched."""
    rule, num_rows = RULES[name], 5
    logits = torch.randn(1, num_rows, NUM_EXPERTS).to(device)
    bias = torch.randn(NUM_EXPERTS).to(device) if rule.is_sigmoid else None
    indptr = indptr_of(3, device)
    expected = choose_experts(logits, bias, indptr, rule)
    places = torch.full((2, num_rows + 3, rule.count), -7, dtype=torch.int32, device=device)
    ids = places[:, :num_rows][1]
    chosen = choose_experts(logits, bias, indptr, rule, ids)
    assert chosen.ids.data_ptr() == ids.data_ptr()
    assert torch.equal(ids, expected.ids) and torch.equal(chosen.weights, expected.weights)
    assert (places[0] == -7).all() and (places[1, num_rows:] == -7).all()


@pytest.mark.parametrize("num_rows", [1, 7, 1500])
def test_pairs_are_in_order_of_their_experts(device: torch.device, num_rows: int) -> None:
    ids = torch.randint(0, NUM_EXPERTS + 1, (num_rows, 3), dtype=torch.int32)
    pairs, indptr = order_pairs(ids.to(device), NUM_EXPERTS)
    flat = ids.flatten().tolist()
    assert pairs.tolist() == sorted(range(len(flat)), key=lambda pair: flat[pair])
    assert indptr.tolist() == [sum(i < e for i in flat) for e in range(NUM_EXPERTS + 2)]


class Layer:
    """Weights of experts, and rows through them."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        widths: tuple[int, int, int],
        *,
        count: int,
        activation: str = "silu",
    ) -> None:
        width_k, width_f, self.width_n = widths
        self.gate_up = torch.randn(NUM_EXPERTS, 2 * width_f, width_k) / width_k**0.5
        self.down = torch.randn(NUM_EXPERTS, self.width_n, width_f) / width_f**0.5
        self.gate_up, self.down = (w.to(device, dtype) for w in (self.gate_up, self.down))
        products = CpuProducts()
        self._held = [
            hold_experts(products, iter(w), NUM_EXPERTS) for w in (self.gate_up, self.down)
        ]
        self.count = count
        self.form = ExpertForm(activation="gelu_tanh" if activation == "gelu_tanh" else "silu")
        if activation == "limited":
            self.form = ExpertForm(
                gate_up_bias=torch.randn(NUM_EXPERTS, 2 * width_f).to(device, dtype),
                down_bias=torch.randn(NUM_EXPERTS, self.width_n).to(device, dtype),
                limit=1.5,
                alpha=1.702,
            )

    def choose(self, ids: list[list[int]]) -> ChosenExperts:
        place = self.down.device
        weights = torch.rand((len(ids), self.count), generator=torch.Generator().manual_seed(5))
        return ChosenExperts(
            ids=torch.tensor(ids, dtype=torch.int32, device=place), weights=weights.to(place)
        )

    def apply(self, x: torch.Tensor, chosen: ChosenExperts) -> torch.Tensor:
        """Return addends; memory that they leave unwritten is NaN."""
        out = torch.full((self.count, len(x), self.width_n), torch.nan, device=x.device)
        apply_experts(x, *self._held, chosen, out, self.form)
        return out

    def expert_of(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return what an expert makes of one row, in float64 on the CPU."""
        gate_up = self.gate_up[expert].double().cpu() @ x.double().cpu()
        form = self.form
        if form.gate_up_bias is not None:
            gate_up += form.gate_up_bias[expert].double().cpu()
        gate, up = gate_up.chunk(2)
        if form.limit:
            gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
            inner = gate * (form.alpha * gate).sigmoid() * (up + 1)
        elif form.activation == "gelu_tanh":
            inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
        else:
            inner = gate * gate.sigmoid() * up
        y = self.down[expert].double().cpu() @ inner
        return y if form.down_bias is None else y + form.down_bias[expert].double().cpu()


def rows_of(chosen: ChosenExperts, rows: list[int]) -> ChosenExperts:
    return ChosenExperts(ids=chosen.ids[rows], weights=chosen.weights[rows])


@pytest.mark.parametrize(
    ("dtype", "widths", "activation"),
    [
        (torch.float32, (1, 1, 1), "silu"),
        (torch.float32, (130, 70, 66), "silu"),
        (torch.float32, (66, 70, 130), "limited"),
        (torch.float32, (66, 70, 130), "gelu_tanh"),
        (torch.float16, (64, 64, 128), "limited"),
        (torch.bfloat16, (72, 40, 24), "silu"),
        (torch.bfloat16, (72, 40, 24), "gelu_tanh"),
    ],
)
def test_products_are_those_of_a_reference(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int, int], activation: str
) -> None:
    layer = Layer(device, dtype, widths, count=2, activation=activation)
    chosen = layer.choose([[0, 3], [3, 11], [1, 3], [0, 10], [NUM_EXPERTS] * 2])
    x = torch.randn(5, widths[0]).to(device, dtype)
    got = layer.apply(x, chosen)
    for row, ids in enumerate(chosen.ids.tolist()):
        for slot, expert in enumerate(ids):
            want = torch.zeros(widths[2], dtype=torch.float64)
            if expert < NUM_EXPERTS:
                want = layer.expert_of(expert, x[row]) * float(chosen.weights[row, slot])
            torch.testing.assert_close(
                got[slot, row].double().cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )


@pytest.mark.parametrize("activation", ["silu", "limited", "gelu_tanh"])
@pytest.mark.parametrize("dtype", first_if_interpreted([torch.float32, torch.bfloat16]))
def test_bits_of_a_row_do_not_depend_on_the_others(
    device: torch.device, dtype: torch.dtype, activation: str
) -> None:
    """Alone, among many, all on one expert, on experts of their own, in any order, padded."""
    layer = Layer(device, dtype, (67, 20, 18), count=3, activation=activation)
    num_rows, own = 35, [2, 5, 9]
    x = torch.randn(num_rows, 67).to(device, dtype)
    crowds = {
        "one expert": [own] * num_rows,
        "some": [sorted(torch.randperm(NUM_EXPERTS)[:3].tolist()) for _ in range(num_rows)],
        "disjoint": [[0, 1, 11]] * num_rows,
        "padded": [[NUM_EXPERTS] * 3] * num_rows,
    }
    alone = layer.apply(x[:1], rows_of(layer.choose([own]), [0]))
    assert alone.isfinite().all() and (alone != 0).any()
    for name, ids in crowds.items():
        chosen = layer.choose([own, *ids[1:]])
        full = layer.apply(x, chosen)
        assert torch.equal(full[:, :1], alone), name
        if name == "some":
            order = torch.randperm(num_rows).tolist()
            assert torch.equal(layer.apply(x[order], rows_of(chosen, order)), full[:, order])
            few = layer.apply(x[:4], rows_of(chosen, list(range(4))))
            assert torch.equal(few, full[:, :4])
        if name == "padded":
            assert (full[:, 1:] == 0).all()


def test_no_rows(device: torch.device) -> None:
    layer = Layer(device, torch.float32, (8, 8, 8), count=2)
    chosen = ChosenExperts(
        ids=torch.empty((0, 2), dtype=torch.int32, device=device),
        weights=torch.empty((0, 2), device=device),
    )
    assert layer.apply(torch.empty((0, 8), device=device), chosen).shape == (2, 0, 8)
