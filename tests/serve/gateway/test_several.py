"""Two gateways on one PostgreSQL, two tritonservers behind both: one service, whichever of them is asked or ends."""

import contextlib
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select

from megadit.serve.gateway.store.database import JOBS, Database
from megadit.serve.launch.local_server import LocalServer

LONG = {"prompt": "a long one", "num_steps": 5000, "num_frames": 1}  # not done before it is cancelled
SHORTER = LONG | {"num_steps": 250}


@pytest.fixture
def tritons(server, repository, kept_running, tmp_path):
    """That of the other tests, and one that may be stopped."""
    settings = {"stop_seconds": 3, "hang_seconds": 1e6, "log": tmp_path / "triton.log"}
    with kept_running(LocalServer(repository, models=("text_to_video",), **settings)) as another:
        yield [server, another]


@pytest.fixture
def gateways(start_gateway, tritons, postgres, tmp_path):
    urls = [f"grpc://{triton.grpc_url}" for triton in tritons]
    return [
        start_gateway(*urls, store=postgres, log=tmp_path / f"{name}.log", arguments=(f"--name={name}", "--slots=2"))
        for name in ("one", "two")
    ]


class Visitor:
    """One key, at both gateways; what the store says of its jobs."""

    def __init__(self, gateways, database, eventually):
        key = gateways[0].new_key()
        self.clients = [gateway.client(key) for gateway in gateways]
        self._database, self._eventually = database, eventually

    def create(self, place: int, **body) -> str:
        answer = self.clients[place].post("/v1/videos", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def rows(self) -> dict:
        with self._database.reading() as connection:
            return {row.id: row for row in connection.execute(select(JOBS))}

    def finish(self, *video_ids: str, at: int = 0) -> None:
        """Waits long: jobs whose server failed are made one after the other."""
        for video_id in video_ids:
            self._eventually(lambda video_id=video_id: self.has_ended(video_id), seconds=900)
            assert self.clients[at].get(f"/v1/videos/{video_id}").json()["status"] == "completed"

    def has_ended(self, video_id: str) -> bool:
        return self.rows()[video_id].status in ("completed", "failed")

    def owners_of_running(self) -> Counter:
        return Counter(row.owner for row in self.rows().values() if row.status == "in_progress")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_several_gateways_and_tritons_are_one_service(gateways, tritons, postgres, eventually):
    with contextlib.closing(Database(postgres)) as database:
        visitor = Visitor(gateways, database, eventually)
        a_job_is_seen_run_once_and_served_at_both(visitor)
        a_job_is_cancelled_at_the_other_gateway(visitor, gateways, eventually)
        work_goes_round_a_triton_that_stands_still(visitor, gateways, tritons[1], eventually)
        a_gateway_that_dies_leaves_its_jobs_to_the_other(visitor, gateways, eventually)


def a_job_is_seen_run_once_and_served_at_both(visitor) -> None:
    def order(index: int, place: int) -> str:
        body, header = {"prompt": f"number {index}", "seed": index}, {"idempotency-key": f"order-{index}"}
        return visitor.clients[place].post("/v1/videos", json=body, headers=header).json()["id"]

    ids = [order(index, index % 2) for index in range(16)]
    assert [order(index, 1 - index % 2) for index in range(16)] == ids, "an order sent to both is one video"
    visitor.finish(*ids)
    assert {row.attempts for row in visitor.rows().values()} == {1} and len(visitor.rows()) == 16
    for video_id in ids:
        contents = [client.get(f"/v1/videos/{video_id}/content") for client in visitor.clients]
        assert contents[0].status_code == 200 and contents[0].content == contents[1].content
    listed = [client.get("/v1/videos", params={"limit": 100}).json() for client in visitor.clients]
    assert [[video["id"] for video in page["data"]] for page in listed] == [ids[::-1]] * 2


def a_job_is_cancelled_at_the_other_gateway(visitor, gateways, eventually) -> None:
    """For each gateway: what it runs is deleted at the one that does not run it, and given up by the one that does."""
    for place, name in enumerate(("one", "two")):
        for _ in range(50):  # which gateway is faster is chance
            video_id = visitor.create(place, **LONG)
            eventually(lambda video_id=video_id: visitor.rows()[video_id].owner is not None)
            if visitor.rows()[video_id].owner == name:
                break
            visitor.clients[place].delete(f"/v1/videos/{video_id}")
        assert visitor.clients[1 - place].delete(f"/v1/videos/{video_id}").status_code == 200
        assert [client.get(f"/v1/videos/{video_id}").status_code for client in visitor.clients] == [404, 404]
        told = f'"event": "job cancelled", "job": "{video_id}"'
        eventually(lambda place=place, told=told: told in gateways[place].log.read_text())


def work_goes_round_a_triton_that_stands_still(visitor, gateways, triton, eventually) -> None:
    with ThreadPoolExecutor(8) as pool:  # asked for one after the other, the first would be done before the last
        ids = list(pool.map(lambda index: visitor.create(index % 2, **SHORTER | {"seed": index}), range(8)))
    eventually(lambda: sum(visitor.owners_of_running().values()) > 4)  # more than one Triton is given
    os.killpg(triton.process.pid, signal.SIGSTOP)
    visitor.finish(*ids, visitor.create(0, prompt="after"), visitor.create(1, prompt="after"))
    for gateway in gateways:
        eventually(lambda gateway=gateway: state(gateway, triton) == "0.0")
        eventually(gateway.is_ready)  # the other Triton is there
    os.killpg(triton.process.pid, signal.SIGCONT)
    for gateway in gateways:
        eventually(lambda gateway=gateway: state(gateway, triton) == "1.0")


def state(gateway, triton) -> str:
    """1.0 if the gateway gives work to this Triton."""
    beginning = f'megadit_server_up{{server="grpc://{triton.grpc_url}"}} '
    return next(line for line in gateway.metrics().splitlines() if line.startswith(beginning)).removeprefix(beginning)


def a_gateway_that_dies_leaves_its_jobs_to_the_other(visitor, gateways, eventually) -> None:
    ids = [visitor.create(0, **SHORTER | {"seed": index}) for index in range(8)]
    eventually(lambda: visitor.owners_of_running()["one"] > 0)
    gateways[0].process.kill()
    gateways[0].process.wait()
    orphans = [
        video_id for video_id, row in visitor.rows().items() if (row.status, row.owner) == ("in_progress", "one")
    ]
    assert orphans
    visitor.finish(*ids, at=1)
    assert {visitor.rows()[video_id].attempts for video_id in orphans} == {2}
    assert {visitor.rows()[video_id].owner for video_id in orphans} == {"two"}
