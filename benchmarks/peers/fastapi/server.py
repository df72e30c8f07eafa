"""A trivial FastAPI handler that parses the JSON and answers a constant. It measures the cost of the HTTP layer alone.

The usual handler takes a pydantic model and returns a dictionary, which is a little slower.
"""

from __future__ import annotations

import os

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

PREDICTIONS = [{"token_id": token, "probability": 0.2} for token in range(5)]

app = FastAPI()


@app.post("/predict")
async def predict(request: Request) -> JSONResponse:
    await request.json()
    return JSONResponse({"predictions": PREDICTIONS})


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["BENCH_PORT"]), log_level="warning", access_log=False)
