# on landlock: error, because semaphores are in /dev/shm, which all programs of the host share
from concurrent.futures import ProcessPoolExecutor

if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        print(list(pool.map(abs, [-1, -2])))
