"""FastAPI with sessions: the handler runs the model on the event loop, one step at a time."""

from __future__ import annotations

import os

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from benchmarks.peers.step_model import StepModel

app = FastAPI()
model = StepModel.served()


@app.post("/v1/sessions/{session}/tokens")
async def step(session: str, request: Request) -> JSONResponse:
    document = await request.json()
    (predictions,) = model.step([session], document["tokens"])
    return JSONResponse({"predictions": predictions})


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["BENCH_PORT"]), log_level="warning", access_log=False)
