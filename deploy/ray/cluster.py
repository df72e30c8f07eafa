"""Runs a local Ray cluster of one node without a dashboard, and Ray Serve on it. Like Ray's command `serve`, this
module sends a configuration to Ray's controller through `ray.serve._private`. The public API for this requires the
dashboard.
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
"""Environment variables for Ray and its workers."""

BELIEVED = "FORWARDED_ALLOW_IPS"
"""The environment variable that names the proxies that uvicorn trusts. Ray's own proxies are uvicorn servers. By
default, they trust any client on the same machine."""

# The size of Ray's object store. It is close to Ray's minimum, because requests and answers do not use the object
# store.
OBJECT_STORE_BYTES = 80 * 2**20
NAMESPACE = "serve"
# The status of an application that Ray could not deploy. Ray does not try again. The status UNHEALTHY can end, because
# Ray restarts unhealthy replicas.
FAILED = "DEPLOY_FAILED"


class DeployFailed(Exception):
    """Ray could not apply the configuration. The message has Ray's reason."""


class Cluster:
    """A context manager that runs the cluster during its `with` block. `port` is the port for clients, by default the
    port in the configuration. `cpus` is the number of cores that Ray may use, by default all cores of the machine.
    `folder` is for Ray's logs and sockets, by default Ray's own folder."""

    def __init__(self, configuration: Path, port: int | None, cpus: int | None, folder: Path | None) -> None:
        self.configuration = configuration
        self.port = port
        self.cpus = cpus
        self.folder = folder

    def __enter__(self) -> Cluster:
        os.environ.update(SURROUNDINGS)
        os.environ[BELIEVED] = os.environ.get(PROXIES, "")
        import ray  # Ray reads its environment when it is imported
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
        """Sends the configuration to Ray Serve, which applies it in the background."""
        self._client.deploy_apps(self._read())

    def state(self) -> str:
        """Returns one line with the state of every replica and whether the configuration is applied. Raises
        DeployFailed if Ray could not deploy an application."""
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
        ready = f"ready at http://{options['host']}:{options['port']}" if running else "not all replicas run yet"
        return f"{', '.join(replicas) or 'no replica'}: {ready}"

    def _read(self) -> Any:
        """Returns the configuration as a schema of Ray Serve. Raises DeployFailed if the file cannot be read or is
        invalid."""
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
    """Returns Ray's messages about an application that does not run, and about its deployments."""
    messages = [application["message"], *(one["message"] for one in application["deployments"].values())]
    return "\n".join(message for message in messages if message)
