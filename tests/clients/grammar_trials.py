"""In the gateway's environment: a trial ends at its time, for its client alone; what leaves is not tried.

python grammar_trials.py MODEL_FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.trials import Trials

file = Path(sys.argv[1]) / "tokenizer.json"
tokens = Tokenizer.from_file(str(file)).get_vocab_size()
# Too large for the front; here it stands for what nobody thought of.
ENDLESS = Constraint("json", '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000000}')
CHOICE = Constraint("choice", '["yes", "no"]')


async def main() -> dict[str, str]:
    """What is said of constraints that compete."""
    trials = Trials(file, tokens, 0)
    await trials.start()
    hostile = [asyncio.ensure_future(trials.refusal("hostile", ENDLESS)) for _ in range(20)]
    await asyncio.sleep(0)
    said = {"choice": await trials.refusal("plain", CHOICE)}
    assert sum(each.done() for each in hostile) <= 2, "others wait for all that one client sent"
    for each in hostile[3:]:
        each.cancel()
    said["endless"] = await hostile[0]
    await asyncio.gather(*hostile, return_exceptions=True)
    assert trials._process is not None
    trials._process.kill()  # as the system does when memory is short
    await trials._process.wait()
    said["died"] = await trials.refusal("plain", CHOICE)
    said["again"] = await trials.refusal("plain", CHOICE)
    trials.stop()
    return said


print(json.dumps(asyncio.run(main())))
