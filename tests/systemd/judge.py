"""Says whether what a handler could do is what it may: RECORDS EVENT FORM SHAPE."""

import json
import sys

#: What must work, or the rest says nothing.
ALLOWED = {"write-state", "read-own"}
#: Only what receives alone has no network at all.
NETWORK = {"network", "network-here", "socket"}

path, event, form, shape = sys.argv[1:]
with open(path) as file:
    records = [json.loads(line) for line in file]
[told] = [one["data"] for one in records if one["subject"] == event]
wrong = []
for name, outcome in told.items():
    if name in NETWORK and shape == "inside":
        continue
    # The one file unpacks itself there.
    if name == "exec-tmp" and form == "release":
        continue
    if outcome.startswith("allowed") != (name in ALLOWED):
        wrong.append(f"{name}: {outcome}")
refused = [name for name, outcome in told.items() if outcome.startswith("refused")]
print("; ".join(wrong) or f"refused {', '.join(refused)}")
sys.exit(bool(wrong))
