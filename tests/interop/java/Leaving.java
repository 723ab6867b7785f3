import java.util.Map;

/**
 * Ends clients at once. One of their threads looks only every three seconds whether it was told to
 * stop, and whoever told it waits for that; here it is woken.
 *
 * <p>It is woken from its sleep only, and only while somebody waits for it: interrupted at work it
 * would close the connection that others use.
 */
final class Leaving {
    private static final long PAUSE_MS = 20;
    private static final String SLEEPER = "NettyEventExecutor";

    private Leaving() {
    }

    /** Run what shuts clients down in the end. */
    static void quickly(Runnable work) {
        Thread caller = Thread.currentThread();
        Thread waker = new Thread(() -> wake(caller));
        waker.setDaemon(true);
        waker.start();
        try {
            work.run();
        } finally {
            waker.interrupt();
        }
    }

    /** The same when the program ends: a client that is shut down earlier costs its others time. */
    static void atTheEnd(Runnable shutdown) {
        Runtime.getRuntime().addShutdownHook(new Thread(() -> quickly(shutdown)));
    }

    private static void wake(Thread caller) {
        try {
            while (true) {
                Thread.sleep(PAUSE_MS);
                if (has(caller.getStackTrace(), "NettyRemotingClient", "shutdown")) {
                    wakeSleepers();
                }
            }
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private static void wakeSleepers() {
        for (Map.Entry<Thread, StackTraceElement[]> entry
                : Thread.getAllStackTraces().entrySet()) {
            if (entry.getKey().getName().equals(SLEEPER)
                    && has(entry.getValue(), "LinkedBlockingQueue", "poll")) {
                entry.getKey().interrupt();
            }
        }
    }

    private static boolean has(StackTraceElement[] frames, String type, String method) {
        for (StackTraceElement frame : frames) {
            if (frame.getClassName().endsWith(type) && frame.getMethodName().equals(method)) {
                return true;
            }
        }
        return false;
    }
}
