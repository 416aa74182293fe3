"""Metrics as objects."""

from __future__ import annotations

from ferrule.llm.metrics import Counter, Gauge, Histogram, Vector, read_metrics

TEXT = """\
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop"} 3.0
vllm:request_success_total{engine="0",finished_reason="length"} 4.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",le="1.0"} 1.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 3.0
vllm:request_prompt_tokens_count{engine="0"} 3.0
vllm:request_prompt_tokens_sum{engine="0"} 12.5
# TYPE process_open_fds gauge
process_open_fds 7.0
"""


def test_each_kind() -> None:
    engine = {"engine": "0"}
    assert read_metrics(TEXT) == [
        Gauge(name="vllm:num_requests_running", labels=engine, value=2.0),
        Counter(name="vllm:request_success", labels={**engine, "finished_reason": "stop"}, value=3),
        Counter(name="vllm:request_success", labels={**engine, "finished_reason": "length"}, value=4),
        Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", labels=engine, values=[9, 5]),
        Histogram(name="vllm:request_prompt_tokens", labels=engine, count=3, sum=12.5, buckets={"1.0": 1, "+Inf": 3}),
    ]
