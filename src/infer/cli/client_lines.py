"""Lines that connect other programs to a running server, ready to be pasted."""

import json
import shlex
from collections.abc import Iterator

NO_KEY, KEY = "none", "YOUR_KEY"  # clients want a key even from a server that takes none


def page_url(url: str) -> str:
    """Return the URL for a browser on this machine. A server that listens on all addresses is reached over the
    loopback.
    """
    return url.replace("://0.0.0.0:", "://127.0.0.1:", 1).replace("://[::]:", "://[::1]:", 1)


def client_lines(url: str, model: str, *, has_keys: bool) -> Iterator[tuple[str, str]]:
    """Yield a program's name and its line for each program. `url` has no path.

    Claude Code, Codex and Open WebUI are commands for a shell; Continue's line belongs in its config.yaml.
    """
    key = KEY if has_keys else NO_KEY
    base, name = page_url(url), shlex.quote(model)
    yield (
        "Claude Code",
        f"ANTHROPIC_BASE_URL={base} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={name} "
        f"ANTHROPIC_DEFAULT_HAIKU_MODEL={name} claude",
    )
    env_key = ', env_key="INFER_API_KEY"' if has_keys else ""
    provider = f'{{name="infer", base_url="{base}/v1", wire_api="responses"{env_key}}}'
    given = f"INFER_API_KEY={key} " if has_keys else ""
    yield "Codex", f"{given}codex -c model_provider=infer -c 'model_providers.infer={provider}' -m {name}"
    values = {"name": model, "provider": "openai", "model": model, "apiBase": f"{base}/v1", "apiKey": key}
    yield "Continue", f"models: [{json.dumps(values, ensure_ascii=False)}]"
    yield "Open WebUI", f"OPENAI_API_BASE_URL={base}/v1 OPENAI_API_KEY={key} open-webui serve"
