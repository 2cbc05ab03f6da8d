import java.util.LinkedHashMap;

public class Service {
    static final int CAPACITY = 3;

    record Entry(String value, long end) {}

    private long now = 0;
    private final LinkedHashMap<String, Entry> entries = new LinkedHashMap<>();

    public String answer(String[] command) {
        String name = command.length == 0 ? "" : command[0];
        if (name.equals("put") && command.length == 4) {
            String evicted = "";
            if (entries.remove(command[1]) == null && entries.size() == CAPACITY) {
                String oldest = entries.keySet().iterator().next();
                entries.remove(oldest);
                evicted = " evicted " + oldest;
            }
            entries.put(command[1], new Entry(command[2], now + Long.parseLong(command[3])));
            return "ok" + evicted;
        }
        if (name.equals("get") && command.length == 2) {
            Entry found = entries.remove(command[1]);
            if (found == null) return "missing";
            entries.put(command[1], found);
            return found.value();
        }
        if (name.equals("tick") && command.length == 2) {
            now += Long.parseLong(command[1]);
            int before = entries.size();
            entries.values().removeIf(one -> one.end() <= now);
            return "expired " + (before - entries.size());
        }
        if (name.equals("keys") && command.length == 1) {
            return entries.isEmpty() ? "empty" : String.join(" ", entries.keySet());
        }
        return "error";
    }
}
