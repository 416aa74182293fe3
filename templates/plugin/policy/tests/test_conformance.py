from ferrule.interfaces.scheduler import RequestView
from ferrule_example import ExamplePolicy
from ferrule_testkit.kits import PolicyKit


class TestConformance(PolicyKit):
    plugin = ExamplePolicy


def view(name: str, arrival: float, prompt: int) -> RequestView:
    return RequestView(
        id=name,
        arrival=arrival,
        sequence=1,
        priority=0,
        num_prompt=prompt,
        num_known=prompt,
        num_computed=0,
        num_preemptions=0,
    )


def test_short_prompts_go_first_until_long_ones_have_waited() -> None:
    policy = ExamplePolicy(ExamplePolicy.Options(tokens_per_second=10.0))
    long = view("long", 0.0, 100)
    assert policy.key(view("soon", 1.0, 10), 2.0) < policy.key(long, 2.0)
    assert policy.key(view("late", 9.5, 10), 10.0) > policy.key(long, 10.0)
