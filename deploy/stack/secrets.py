"""Creates the passwords and keys for the services of docker-compose.yml. Each service has a folder, and each secret a
file. Existing files are not changed.

    python3 -m deploy.stack.secrets [FOLDER]      FOLDER: default secrets, where docker-compose.yml expects them

    wane/api_keys               hashes of API keys: `client`, and `prometheus` with access to metrics only
    client_key                  the API key of `client`
    prometheus/metrics_key      the API key of `prometheus`
    redis/redis_acl             users of Redis, with hashes of passwords; Wane's user has only the needed permissions
    redis/redis_password        the password of Wane's user
    wane/redis_password         the same password
    redis_admin_password        the password of Redis's user `admin`, which has all permissions; no container has it
    grafana/grafana_password    the password of Grafana's user admin

Only the folder's owner can enter the folder. All users may read the files in the folder, because a container's user is
not the owner of the files. `wane key NAME >> secrets/wane/api_keys` adds another key.
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
    *("TIME", "ZADD", "ZCARD", "ZRANGEBYSCORE", "ZREM", "ZSCORE"),  # for the quotas of API keys
)
"""The commands of Redis that Wane and its scripts use: docs/sessions.md lists them."""

KEYS = "wane:*"
"""The pattern of the Redis keys that Wane uses. Wane uses no channels of Redis."""


def make(folder: Path) -> list[str]:
    """Creates missing secrets and the files with their hashes. Returns the names of the new files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made: list[str] = []

    def keep(name: str, text: str) -> str:
        """Writes the text to the file if the file does not exist. Returns the file's content."""
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
    """Returns the content of Redis's ACL file, with the hashes of the users' passwords. Wane sends no user name, so its
    user is `default`."""
    may = " ".join(f"+{command.lower()}" for command in COMMANDS)
    return f"user default on #{wane} ~{KEYS} resetchannels -@all {may}\nuser admin on #{admin} ~* &* +@all"


def main() -> None:
    """Creates missing secrets and prints their names."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "secrets")
    print(f"{folder}: created {', '.join(make(folder)) or 'no files, because all files exist'}")


if __name__ == "__main__":
    main()
