import asyncio


async def main():
    child = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
    print((await child.communicate())[0])


asyncio.run(main())
