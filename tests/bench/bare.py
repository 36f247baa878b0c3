"""The limit: a Starlette route that reads the body and answers, on the same server and loop."""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route


async def receive(request: Request) -> PlainTextResponse:
    await request.body()
    return PlainTextResponse("ok\n")


app = Starlette(routes=[Route("/webhooks/{source}", receive, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        log_level="warning",
        access_log=False,
        http="httptools",
        loop="uvloop",
    )
