import asyncio


async def square(number):
    await asyncio.sleep(0.01)
    return number * number


async def main():
    print(await asyncio.gather(*map(square, range(5))))


asyncio.run(main())
