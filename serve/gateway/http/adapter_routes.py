"""The routes of adapters: a key's own, and the service's for every key."""

from collections.abc import Callable
from typing import Annotated, Literal

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile

from megadit.serve.gateway.adapters import StoredAdapter
from megadit.serve.gateway.errors import ApiError, unavailable
from megadit.serve.gateway.http.schemas import ERRORS
from megadit.serve.gateway.media import form_of
from megadit.serve.gateway.service import Gateway
from megadit.serve.gateway.store.keys import Key
from megadit.serve.service_info import AdapterInfo


class Adapter(BaseModel):
    """A LoRA adapter of the model."""

    id: str = Field(description="Name of the adapter in requests")
    object: Literal["adapter"] = "adapter"
    owned_by: Literal["key", "service"]
    bytes: int
    created_at: int = Field(description="Seconds since 1970")

    @classmethod
    def of(cls, adapter: StoredAdapter) -> "Adapter":
        return cls(
            id=adapter.name,
            owned_by="service" if adapter.key_id is None else "key",
            bytes=adapter.num_bytes,
            created_at=int(adapter.created_at),
        )


class AdapterList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Adapter]


class AdapterDeleted(BaseModel):
    id: str
    object: Literal["adapter.deleted"] = "adapter.deleted"
    deleted: Literal[True] = True


_FORM = {
    "type": "object",
    "required": ["name", "file"],
    "properties": {
        "name": {"type": "string", "maxLength": 100},
        "file": {"type": "string", "format": "binary", "description": "safetensors, as `megadit convert` writes it"},
    },
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


def adapter_routes(gateway: Gateway, authenticate: Callable[..., Key]) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["adapters"], responses=ERRORS)
    Authenticated = Annotated[Key, Depends(authenticate)]
    one_at_a_time = CapacityLimiter(1)  # each check imports torch in a process; waiting requests hold no threads

    @router.post("/adapters", response_model=Adapter, openapi_extra=_BODY)
    async def upload_adapter(request: Request, key: Authenticated) -> Adapter:
        """Uploads an adapter as a safetensors file, which is checked against this service's network."""
        with gateway.uploads.admitted(request, key):
            if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
                raise ApiError(415, "unsupported_media_type", "send multipart/form-data: a name and a file")
            async with form_of(request, max_files=1, max_fields=1) as form:
                name, file = form.get("name"), form.get("file")
                if not isinstance(name, str) or not isinstance(file, UploadFile):
                    raise ApiError(400, "invalid_request", "send a name and a file")
                put = (gateway.adapters.put, key, name, file.file, _info(gateway))
                async with gateway.looking.of(key.id):
                    stored = await to_thread.run_sync(*put, limiter=one_at_a_time)
        return Adapter.of(stored)

    @router.get("/adapters", response_model=AdapterList)
    def list_adapters(key: Authenticated) -> AdapterList:
        """List the adapters that this key may use: its own, and the service's."""
        info = gateway.servers.info(gateway.servers.models[0])
        adapters = gateway.adapters.all(key, None if info is None else info.adapters)
        return AdapterList(data=[Adapter.of(each) for each in adapters])

    @router.delete("/adapters/{name}", response_model=AdapterDeleted)
    def delete_adapter(key: Authenticated, name: str) -> AdapterDeleted:
        """Deletes an adapter of this key; videos that wait for it fail with the code `adapter_not_found`."""
        gateway.adapters.remove(key, name)
        return AdapterDeleted(id=name)

    return router


def _info(gateway: Gateway) -> AdapterInfo:
    info = gateway.servers.info(gateway.servers.models[0])
    if info is None:
        raise unavailable("not_ready", "no server has been seen yet")
    if info.adapters is None:
        raise ApiError(400, "unsupported", "this service supports no adapters")
    return info.adapters
