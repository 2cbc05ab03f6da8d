import java.util.Scanner;

public class Main {
    public static void main(String[] arguments) {
        Service service = new Service();
        Scanner lines = new Scanner(System.in);
        while (lines.hasNextLine()) {
            String line = lines.nextLine().strip();
            System.out.println(service.answer(line.isEmpty() ? new String[0] : line.split("\\s+")));
        }
    }
}
