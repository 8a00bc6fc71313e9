"""`router.ReplicaRouter` for Ray Serve. Each process that sends requests has its own router, which learns from them."""

from typing import final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from infer.serving.distributed.router import NUM_PAGES, ReplicaRouter, RoutedPrompt


@final
class PrefixRouter(RequestRouter):
    """A router for calls whose second argument is a `RoutedPrompt`."""

    def initialize_state(self, num_pages: int = NUM_PAGES) -> None:
        self._router = ReplicaRouter(num_pages)
        self._under_way: dict[str, tuple[str, RoutedPrompt]] = {}  # replica and prompt, by request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the best replica, then all others. Ray uses the first one that is not full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        queued = dict.fromkeys(replicas, 0.0)
        for name, prompt in self._under_way.values():
            if name in queued:
                queued[name] += prompt.work
        best = replicas.pop(self._router.choose(_prompt_of(pending_request), queued))
        return [[best], list(replicas.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        prompt, name = _prompt_of(pending_request), replica_id.unique_id
        self._under_way[pending_request.metadata.internal_request_id] = name, prompt
        self._router.sent(prompt, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._under_way.pop(internal_request_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        gone = self.curr_replicas.keys() - {each.replica_id for each in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._router.forget(replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._router.forget(replica_id.unique_id)


def _prompt_of(pending_request: PendingRequest) -> RoutedPrompt:
    prompt: RoutedPrompt = pending_request.args[1]
    return prompt
