"""What verifying costs for each sender, against Stripe's: python -m tests.bench.senders [PATH_US].

PATH_US is the CPU time of a whole Stripe delivery on the machine, in microseconds; no sender may
cost more than a tenth of it beyond what Stripe costs.
"""

import json
import sys
import time

from receiver import presets
from receiver.presets import Preset, Scheme
from receiver.verify import Contract, Delivery, Secret, verify
from tests.senders import deliver, secret_of
from tests.test_senders import IN_CODE, NOW_MS

PATH_US = 570.0
PART = 0.1
# In turns, so that what else runs on the machine falls on all alike; the best turn counts.
TURNS, TIMES = 40, 20


def body_of(preset: Preset, scheme: Scheme) -> bytes:
    """About 3 kB of the kind that the sender posts."""
    assert scheme.sig is not None
    if scheme.sig.kind == "form" and scheme.sig.pointer is not None:
        return json.dumps({"message_id": "1", "text": "x" * 2600}).encode()
    form = any(at.kind == "form" and at.pointer is None for at in preset.event_id)
    if form and scheme.sig.kind != "json":
        return b"id=tr_1&sale_id=1&resource_name=sale&text=" + b"x" * 2800
    lines = [{"id": f"li_{i}", "amount": i, "text": "x" * 40, "on": True} for i in range(30)]
    return json.dumps({"id": "evt_1", "type": "invoice.paid", "lines": lines}).encode()


def cost_us(contract: Contract, delivery: Delivery) -> float:
    start = time.process_time_ns()
    for _ in range(TIMES):
        verify(contract, delivery)
    return (time.process_time_ns() - start) / TIMES / 1000


def main() -> None:
    path_us = float(sys.argv[1]) if sys.argv[1:] else PATH_US
    cases = {}
    for name in presets.names():
        preset = presets.get(name)
        for number, scheme in enumerate(preset.schemes if name not in IN_CODE else ()):
            delivery = deliver(preset, body_of(preset, scheme), scheme=scheme, at_ms=NOW_MS)
            secret = Secret("env:SECRET", secret_of(scheme))
            cases[f"{name}-{number}"] = (Contract(name, name, preset, (secret,)), delivery)
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(TURNS):
        best = {name: min(best[name], cost_us(*case)) for name, case in cases.items()}
    for name, cost in sorted(best.items(), key=lambda item: -item[1]):
        more = (cost - best["stripe-0"]) / path_us
        print(f"{name:22} {cost:6.1f} us {more:+7.1%}{'  over' if more > PART else ''}")


if __name__ == "__main__":
    main()
