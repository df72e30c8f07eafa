"""Passwords and keys of the services of docker-compose.yml, a folder for each, and a file for each of them; what is
there stays as it is.

    python3 -m deploy.stack.secrets [FOLDER]      FOLDER: secrets, where docker-compose.yml looks for them

    wane/api_keys               who may ask, by hashes: `client`, and `prometheus`, for the metrics alone
    client_key                  the first one's key
    prometheus/metrics_key      the second one's
    redis/redis_acl             who may use Redis, by hashes: Wane, as far as it has to, by
    redis/redis_password        this one
    wane/redis_password         the same
    redis_admin_password        of Redis's user `admin`, who may do everything there; no container has it
    grafana/grafana_password    of Grafana's user admin

The folder is for its owner alone. What is in it can be read by all who can reach it: a container is given a folder as
it is, and those in it are not its owner. Further keys: `wane key NAME >> secrets/wane/api_keys`.
"""

from __future__ import annotations

import secrets
import sys
from hashlib import sha256
from pathlib import Path

API_KEYS = "wane/api_keys"
CLIENT_KEY = "client_key"
METRICS_KEY = "prometheus/metrics_key"
REDIS_ACL = "redis/redis_acl"
REDIS_PASSWORD = "redis/redis_password"
ADMIN_PASSWORD = "redis_admin_password"
STORE_PASSWORD = "wane/redis_password"
GRAFANA_PASSWORD = "grafana/grafana_password"
DRAWN = (CLIENT_KEY, METRICS_KEY, REDIS_PASSWORD, ADMIN_PASSWORD, GRAFANA_PASSWORD)
PREFIX = {CLIENT_KEY: "wane_", METRICS_KEY: "wane_"}
RANDOM_BYTES = 32

COMMANDS = (
    *("EVAL", "EVALSHA", "GET", "GETRANGE", "SET", "DEL", "PTTL", "PEXPIRE", "LASTSAVE", "PING"),
    *("TIME", "ZADD", "ZCARD", "ZINCRBY", "ZRANGEBYSCORE", "ZREM", "ZSCORE"),  # for the quotas of keys
)
"""Of Redis, what Wane asks for, by itself and in its scripts: docs/sessions.md lists them."""

KEYS = "wane:*"
"""The keys that it asks for them of. It uses no channel."""


def make(folder: Path) -> list[str]:
    """Makes what is missing, and what hashes of it; the names of the files that were made."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made: list[str] = []

    def keep(name: str, text: str) -> str:
        """What the file holds, which is the text if there was none."""
        file = folder / name
        if not file.exists():
            if file.parent != folder:
                file.parent.mkdir(exist_ok=True)
                file.parent.chmod(0o755)
            file.write_text(text + "\n", encoding="utf-8")
            file.chmod(0o644)
            made.append(name)
        return file.read_text(encoding="utf-8").strip()

    drawn = {name: keep(name, PREFIX.get(name, "") + secrets.token_urlsafe(RANDOM_BYTES)) for name in DRAWN}
    hashes = {name: sha256(secret.encode()).hexdigest() for name, secret in drawn.items()}
    keep(API_KEYS, f"client:sha256:{hashes[CLIENT_KEY]}\nprometheus:sha256:{hashes[METRICS_KEY]} scope=metrics")
    keep(STORE_PASSWORD, drawn[REDIS_PASSWORD])
    keep(REDIS_ACL, redis_acl(hashes[REDIS_PASSWORD], hashes[ADMIN_PASSWORD]))
    return made


def redis_acl(wane: str, admin: str) -> str:
    """Redis's file of users, by the hashes of their passwords. Wane gives no name, and so is `default`."""
    may = " ".join(f"+{command.lower()}" for command in COMMANDS)
    return f"user default on #{wane} ~{KEYS} resetchannels -@all {may}\nuser admin on #{admin} ~* &* +@all"


def main() -> None:
    """Makes them, and says which."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "secrets")
    print(f"{folder}: made {', '.join(make(folder)) or 'nothing: all is there'}")


if __name__ == "__main__":
    main()
