"""Output as it comes, and a task that is cancelled: the program ends with it."""

import asyncio

import belljar

belljar.run(
    "for step in range(3): print('step', step, flush=True)",
    on_stdout=lambda text: print(f"[live] {text}", end=""),
)
print()


async def main() -> None:
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(
        belljar.arun(
            "import time\nprint('working', flush=True)\ntime.sleep(600)",
            on_stdout=lambda text: loop.call_soon_threadsafe(seen.set),
        )
    )
    await seen.wait()
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("cancelled, and the program is gone")


asyncio.run(main())
