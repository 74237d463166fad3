from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor() as pool:
    print(sum(pool.map(len, ["a", "bb", "ccc"])))
