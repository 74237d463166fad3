# on landlock: error, because semaphores are in /dev/shm, which all programs of the host share
import multiprocessing

if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(pool.map(abs, [-1, -2]))
