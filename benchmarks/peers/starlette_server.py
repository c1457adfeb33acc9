"""A plain server of starlette and onnxruntime, without batching.

starlette_server.py MODEL PORT
"""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from peers.onnx_classifier import Classifier

classifier = Classifier(sys.argv[1])


async def predict(request: Request) -> JSONResponse:
    image = classifier.decode((await request.json())["image"])
    return JSONResponse({"probability": classifier.run([image])[0]})


uvicorn.run(
    Starlette(routes=[Route("/predict", predict, methods=["POST"])]),
    port=int(sys.argv[2]),
    log_level="warning",
    access_log=False,
)
