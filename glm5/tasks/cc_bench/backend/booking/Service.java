import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.Collectors;

public class Service {
    static final int OPEN = 8;
    static final int CLOSE = 18;
    static final int GAP = 15;

    record Booking(int number, String room, int start, int end) {}

    private int last = 0;
    private final Map<Integer, Booking> bookings = new TreeMap<>();

    private String refused(String room, int start, int end, int own) {
        if (!(OPEN * 60 <= start && start < end && end <= CLOSE * 60)) return "error time";
        for (Booking one : bookings.values()) {
            boolean near = start < one.end() + GAP && one.start() < end + GAP;
            if (one.room().equals(room) && one.number() != own && near) return "error taken " + one.number();
        }
        return null;
    }

    private List<Booking> inRoom(String room) {
        List<Booking> found = new ArrayList<>(bookings.values());
        found.removeIf(one -> !one.room().equals(room));
        found.sort(Comparator.comparingInt(Booking::start));
        return found;
    }

    public String answer(String[] command) {
        String name = command.length == 0 ? "" : command[0];
        switch (name + " " + command.length) {
            case "book 4": {
                int start = Integer.parseInt(command[2]), end = Integer.parseInt(command[3]);
                String error = refused(command[1], start, end, 0);
                if (error != null) return error;
                bookings.put(++last, new Booking(last, command[1], start, end));
                return "ok " + last;
            }
            case "cancel 2":
                return bookings.remove(Integer.parseInt(command[1])) == null ? "error unknown" : "ok";
            case "move 4": {
                Booking one = bookings.get(Integer.parseInt(command[1]));
                if (one == null) return "error unknown";
                int start = Integer.parseInt(command[2]), end = Integer.parseInt(command[3]);
                String error = refused(one.room(), start, end, one.number());
                if (error != null) return error;
                bookings.put(one.number(), new Booking(one.number(), one.room(), start, end));
                return "ok";
            }
            case "list 2": {
                String text = inRoom(command[1]).stream()
                        .map(one -> one.number() + ":" + one.start() + "-" + one.end())
                        .collect(Collectors.joining(" "));
                return text.isEmpty() ? "none" : text;
            }
            case "free 3": {
                int minutes = Integer.parseInt(command[2]), start = OPEN * 60;
                for (Booking one : inRoom(command[1]))
                    if (start + minutes + GAP > one.start()) start = one.end() + GAP;
                return start + minutes <= CLOSE * 60 ? "" + start : "none";
            }
            default:
                return "error command";
        }
    }
}
