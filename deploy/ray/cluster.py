"""A Ray of this process's own, of one node and without a dashboard, and Serve on it.

`ray.serve._private` is where the `serve` command, too, takes a configuration's file to the controller: nothing public
does that without the dashboard.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from deploy.ray.front import CALLBACK
from deploy.stack.local import PROXIES, ROOT

SURROUNDINGS = {
    "PYTHONPATH": str(ROOT),
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CALLBACK,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}
"""What Ray and its workers find in their environment."""

BELIEVED = "FORWARDED_ALLOW_IPS"
"""By which Ray's proxies, which are uvicorn's servers, know whom to believe whose a request is. Without it they believe
whoever comes from their own machine."""

OBJECT_STORE_BYTES = 80 * 2**20  # requests and answers are messages, and no objects: about as small as Ray takes it
NAMESPACE = "serve"
FAILED = "DEPLOY_FAILED"  # of no hope; what is unhealthy is made anew


class DeployFailed(Exception):
    """Ray could not make the configuration so; the message has what it says."""


class Cluster:
    """A context. `port` is the configuration's where it is None, as `cpus` is the machine's and `folder` is Ray's."""

    def __init__(self, configuration: Path, port: int | None, cpus: int | None, folder: Path | None) -> None:
        self.configuration = configuration
        self.port = port
        self.cpus = cpus
        self.folder = folder

    def __enter__(self) -> Cluster:
        os.environ.update(SURROUNDINGS)
        os.environ[BELIEVED] = os.environ.get(PROXIES, "")
        import ray  # reads its environment when it is imported
        from ray.serve._private.api import serve_start

        schema = self._read()
        try:
            ray.init(
                num_cpus=self.cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                namespace=NAMESPACE,
                _temp_dir=None if self.folder is None else str(self.folder.resolve()),
            )
            self._client = serve_start(
                http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location
            )
        except BaseException:
            ray.shutdown()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        import ray
        from ray import serve

        try:
            serve.shutdown()
        finally:
            ray.shutdown()

    def deploy(self) -> None:
        """Tells Serve the configuration, which it then follows by itself."""
        self._client.deploy_apps(self._read())

    def state(self) -> str:
        """How it stands, in a line: every replica, and whether all is as it is wanted. Raises DeployFailed."""
        details = self._client.get_serve_details()
        replicas: list[str] = []
        applications = details["applications"].items()
        for name, application in applications:
            if application["status"] == FAILED:
                raise DeployFailed(f"{name} is {application['status'].value}: {said(application)}")
            replicas += [
                f"{replica['replica_id']} (pid {replica.get('pid', '-')}, {replica['state'].value})"
                for deployment in application["deployments"].values()
                for replica in sorted(deployment["replicas"], key=lambda one: str(one["replica_id"]))
            ]
        running = replicas and all(application["status"] == "RUNNING" for _, application in applications)
        options = details["http_options"]
        ready = f"ready at http://{options['host']}:{options['port']}" if running else "on the way"
        return f"{', '.join(replicas) or 'no replica'}: {ready}"

    def _read(self) -> Any:
        """The configuration as Serve has it. Raises DeployFailed."""
        from pydantic import ValidationError
        from ray.serve.schema import ServeDeploySchema

        try:
            document = yaml.safe_load(self.configuration.read_text(encoding="utf-8"))
            if self.port is not None:
                document["http_options"]["port"] = self.port
            return ServeDeploySchema.model_validate(document)
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise DeployFailed(f"{self.configuration}: {error}") from error


def said(application: dict[str, Any]) -> str:
    """What Ray says of an application that does not run: its own message, and those of its deployments."""
    messages = [application["message"], *(one["message"] for one in application["deployments"].values())]
    return "\n".join(message for message in messages if message)
