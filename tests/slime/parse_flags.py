"""Hands command lines to slime's real parser, with Megatron-core's, SGLang's and the router's behind it.

    python parse_flags.py < JOBS.json      # {name: [loop, flag, ...]} on stdin

Prints as its last line {"flags": every flag that any of the parsers knew, "jobs": {name: {"error"} or the settings
that a test looks at}}. In a process of its own: Megatron-core and slime keep global state.
"""

from __future__ import annotations

import argparse
import json
import sys

LOOKED_AT = (
    *("colocate", "rollout_num_gpus", "sglang_disable_radix_cache", "pause_generation_mode", "sglang_config"),
    *("rollout_function_path", "use_tis", "custom_tis_function_path", "max_version_lag", "window_size"),
    *("custom_generate_function_path", "sglang_router_policy", "hidden_size", "num_experts"),
)


def main() -> None:
    from slime_backend.slime_hooks import entry, worker_setup

    worker_setup.setup()
    flags: set[str] = set()
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def noting(self, *args, **kwargs):
        flags.update(name for name in self._option_string_actions if name.startswith("--"))
        return parse_known_args(self, *args, **kwargs)

    argparse.ArgumentParser.parse_known_args = noting
    jobs = {}
    for name, (loop, *words) in json.load(sys.stdin).items():
        sys.argv = ["parse_flags.py", *words]
        try:
            args = entry.parse(asynchronous=loop == "train_async")
            jobs[name] = {key: getattr(args, key, None) for key in LOOKED_AT}
        except (SystemExit, Exception) as error:
            jobs[name] = {"error": f"{type(error).__name__}: {error}"}
    print()
    print(json.dumps({"flags": sorted(flags), "jobs": jobs}, default=str))


if __name__ == "__main__":
    main()
