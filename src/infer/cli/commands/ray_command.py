"""`infer ray deploy`: run the application of `distributed.ray_serve` on the current Ray cluster, or start one here."""

import os

import ray
from ray import serve

from infer.cli.commands.serve_command import make_settings, url_of
from infer.cli.options.model_loading import model_settings
from infer.cli.options.server_options import DeployOptions
from infer.cli.terminal.process_streams import cancel_on_signal
from infer.errors import InvalidRequestError
from infer.serving.distributed.ray_serve import Deployed, application
from infer.serving.server.process import bind
from infer.serving.server_settings import ServerSettings
from infer.system.cores.cores import num_processors
from infer.system.status_line import write_notice

_OBJECT_STORE_BYTES = 100 * 2**20  # answers go through it in small pieces
_NAME = "infer"


def run_deploy(options: DeployOptions) -> int:
    """Deploy the application, and return 0 when it serves.

    If a cluster was started for it, return after a signal has ended both.
    """
    settings = make_settings(options)
    most = options.max_replicas or options.replicas
    model = model_settings(options)
    threads = model.threads or max(1, num_processors() // most)
    names = ("replicas", "fronts", "max_replicas", "upscale_seconds", "downscale_seconds")
    asked = Deployed(
        load={"model": options.model, **vars(model), "threads": threads},
        settings=settings,
        **{name: getattr(options, name) for name in names},
    )
    is_own = _join(num_cpus=threads * most)
    try:
        port = _free_port(settings) if is_own else settings.port
        serve.start(http_options={"host": settings.host, "port": port})
        serve.run(application(asked), name=_NAME, route_prefix="/")
        write_notice(f"{url_of(settings, port)}/v1: at most {most} replicas of {settings.model}")
        if is_own:
            with cancel_on_signal() as cancellation:  # in place of Ray's handlers
                cancellation.event.wait()
            serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def _free_port(settings: ServerSettings) -> int:
    """Return the port to listen on. Raises InvalidRequestError if the requested port is taken."""
    with bind(settings) as listener:
        port: int = listener.getsockname()[1]
    return port


def _join(num_cpus: int) -> bool:
    """Join the current cluster, or start one on this machine only, which ends with this process.

    Return True if a cluster was started. Raises InvalidRequestError if there is no cluster at $RAY_ADDRESS.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # they would be sent to another host
    # The default of 5 s is too short on a busy machine.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    try:
        ray.init("auto", log_to_driver=False)
    except ConnectionError as error:
        if address := os.environ.get("RAY_ADDRESS"):
            raise InvalidRequestError(
                f"RAY_ADDRESS={address!r:.80}: no cluster there lets us in: start one (ray start --head), set "
                "RAY_AUTH_MODE=token if it asks for the token in ~/.ray/auth_token, or unset RAY_ADDRESS"
            ) from error
        ray.init(
            num_cpus=num_cpus, include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, log_to_driver=False
        )
        return True
    return False
