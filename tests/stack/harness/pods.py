"""Runs the pods of the Kubernetes manifests as processes of this machine. On a node of a cluster, they would be
containers. A pod's process has the command, the environment variables and the probes of its container. Stopping a pod
runs the preStop hook, sends SIGTERM, and sends SIGKILL after the grace period."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from deploy.stack.compose import Mount, Service
from deploy.stack.local import ROOT, Addresses, Place, command
from deploy.stack.process import Process
from tests.deploy.test_kubernetes import PODS

WAIT_S = 120.0


class Pod:
    """One pod of the Deployment or StatefulSet `name`. `port` is the local port for the pod's first container port.
    `addresses` are the local addresses of the other pods. `variables` override the variables of the manifest. `files`
    maps the mount paths of the container to local files. `folder` has a subfolder `secrets`, with one folder for each
    Secret."""

    def __init__(
        self,
        name: str,
        port: int,
        addresses: Addresses,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        files: Mapping[str, Path] | None = None,
    ) -> None:
        pod: Any = PODS[name]
        (self.container,) = pod["containers"]
        self.port = port
        service = Service(
            name=name,
            image=self.container["image"].split(":")[0],
            command=tuple(self.container.get("command", ())),
            environment={one["name"]: one["value"] for one in self.container.get("env", ())} | dict(variables or {}),
            mounts=(
                *(Mount(f"./{os.path.relpath(path, ROOT)}", target) for target, path in (files or {}).items()),
                *(
                    Mount(one["name"], one["mountPath"])
                    for one in self.container["volumeMounts"]
                    if one["mountPath"] == self.container.get("workingDir")
                ),
            ),
            ports=tuple(one["containerPort"] for one in self.container["ports"]),
            published={},
            after=frozenset(),
            secrets=name if any("secret" in one for one in pod["volumes"]) else None,
            grace_s=float(pod["terminationGracePeriodSeconds"]),
        )
        self.places = {**addresses, (name, service.ports[0]): port}
        place = Place(self.places, folder / "secrets", volumes=folder, copies=folder / "copies")
        self.process = Process(service, command(service, place), port, folder / f"{name}-{port}.log")

    def start(self) -> None:
        """Starts the process, without waiting until it is ready."""
        self.process.start()

    async def ready(self) -> None:
        """Waits until the startup probe has succeeded, if there is one, and then the readiness probe."""
        async with asyncio.timeout(WAIT_S):
            for kind in ("startupProbe", "readinessProbe"):
                if kind in self.container:
                    await self._succeeds(self.container[kind])

    async def _succeeds(self, probe: Mapping[str, Any]) -> None:
        path, named = probe["httpGet"]["path"], probe["httpGet"]["port"]
        (container_port,) = [one["containerPort"] for one in self.container["ports"] if one["name"] == named]
        url = f"http://127.0.0.1:{self.places[self.process.name, container_port]}"
        async with httpx.AsyncClient(base_url=url, timeout=probe.get("timeoutSeconds", 1)) as client:
            while True:
                try:
                    if (await client.get(path)).is_success:
                        return
                except httpx.TransportError:
                    assert self.process.running, self.process.log.read_text()
                await asyncio.sleep(0.1)

    async def delete(self) -> int:
        """Stops the pod as kubelet does. Returns the exit code, which is negative if a signal killed the process."""
        await asyncio.sleep(self.container["lifecycle"]["preStop"]["sleep"]["seconds"])
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait)
