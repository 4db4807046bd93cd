"""The process that runs math-verify: a pair of answers a line in, a verdict a line out.

A script of its own, because math-verify's timeouts are signals, which fail off the main thread,
and because an answer may ask sympy for more time or memory than there is.
"""

import json
import logging
import os
import resource
import sys

MAX_MEMORY = 2 << 30


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like a verdict
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    sys.set_int_max_str_digits(4300)
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> list:
        config = [LatexExtractionConfig(boxed_match_priority=0)]
        return parse(f"\\boxed{{{text}}}", config, parsing_timeout=None, raise_on_error=True)

    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            known, given = read(gold), read(answer)
            equal = bool(known and given) and verify(known, given, timeout_seconds=None)
        except Exception:
            equal = False  # no expression at all
        print(json.dumps(bool(equal)), file=replies, flush=True)


if __name__ == "__main__":
    main()
